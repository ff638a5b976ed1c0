#!/usr/bin/env python3
"""Prints a manifest for a run: render.py --name NAME --image IMAGE --hosts H --claim CLAIM -- CONFIG [options]

Everything after -- goes to lockstep train, after --resume and --run-dir /runs/NAME. Needs Python alone.
See README.md beside this file.
"""

import argparse
import json
import re
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

TEMPLATE = Path(__file__).with_name("job.yaml.template")
LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
LONGEST_NAME = 52
"""A label has 63 characters at most, and a pod's hostname is NAME-INDEX; the Secret's is NAME-token."""
SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
IMAGE = re.compile(r"[\w][\w./:@+-]*", re.ASCII)
PRIVATE = re.compile(r"(token|key|password|secret)\s*$", re.IGNORECASE)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options, checked: whatever is wrong is said in one line, and ends the program with code 2."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", required=True, help="of the Job, its Service and the run: a DNS label")
    parser.add_argument("--image", required=True, help="a container image with Lockstep")
    parser.add_argument("--hosts", required=True, type=int, help="pods, one a host")
    parser.add_argument("--claim", required=True, help="a PersistentVolumeClaim that all pods can write")
    parser.add_argument("--gpus", type=int, default=0, help="nvidia.com/gpu of each pod (default: 0)")
    parser.add_argument("--cpu", default="2", help="CPUs of each pod (default: 2)")
    parser.add_argument("--memory", default="8Gi", help="memory of each pod (default: 8Gi)")
    parser.add_argument("--port", type=int, default=29400, help="of the rendezvous (default: 29400)")
    parser.add_argument(
        "--retries", type=int, default=None, help="failed pods that are made up for (default: 10 x hosts)"
    )
    parser.add_argument("--grace-seconds", type=int, default=90, help="from SIGTERM to SIGKILL (default: 90)")
    parser.add_argument("train", nargs="+", metavar="-- CONFIG [options]", help="arguments of lockstep train")
    options = parser.parse_args(argv)
    for problem in problems(options):
        parser.error(problem)
    return options


def problems(options: argparse.Namespace) -> list[str]:
    """What a cluster would refuse, or would not do as meant."""
    found = []
    if not LABEL.fullmatch(options.name) or len(options.name) > LONGEST_NAME:
        found.append(
            f"--name {options.name!r}: lower-case letters, digits, '-'; at most {LONGEST_NAME} of them, a letter first"
        )
    if not SUBDOMAIN.fullmatch(options.claim) or len(options.claim) > 253:
        found.append(f"--claim {options.claim!r}: is no name of a PersistentVolumeClaim")
    if not IMAGE.fullmatch(options.image):
        found.append(f"--image {options.image!r}: is no name of an image")
    for name, quantity in (("--cpu", options.cpu), ("--memory", options.memory)):
        if not re.fullmatch(r"\d+(\.\d+)?(m|[kKMGTPE]i?)?", quantity, re.ASCII):
            found.append(f"{name} {quantity!r}: must be a quantity, such as 2, 500m or 8Gi")
    least = {"hosts": 1, "gpus": 0, "port": 1, "grace_seconds": 1}
    found += [
        f"--{name.replace('_', '-')} {getattr(options, name)}: must be at least {least[name]}"
        for name in least
        if getattr(options, name) < least[name]
    ]
    if options.port > 65535:
        found.append(f"--port {options.port}: must be at most 65535")
    found += [
        f"{word.split('=')[0]}: a secret would stand in the manifest and in process lists; put it into a Secret"
        for word in options.train
        if "=" in word and PRIVATE.search(word.split("=")[0])
    ]
    return found


def render(options: argparse.Namespace, token: str) -> str:
    """The manifest. Every value is put in as JSON, which is YAML too and which nothing can break out of."""
    resources: dict[str, dict[str, object]] = {"requests": {"cpu": options.cpu, "memory": options.memory}}
    if options.gpus:
        resources["limits"] = {"nvidia.com/gpu": options.gpus}
    values = {
        "name": options.name,
        "secret": f"{options.name}-token",
        "token": token,
        "hosts": options.hosts,
        "hosts_text": str(options.hosts),
        "rendezvous": f"{options.name}-0.{options.name}:{options.port}",
        "port": options.port,
        "retries": 10 * options.hosts if options.retries is None else options.retries,
        "grace_seconds": options.grace_seconds,
        "image": options.image,
        # $(NAME) would be replaced by a variable of the container; doubled, it stays as it is.
        "arguments": [word.replace("$(", "$$(") for word in arguments(options)],
        "resources": resources,
        "claim": options.claim,
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: json.dumps(values[match[1]]), TEMPLATE.read_text())


def arguments(options: argparse.Namespace) -> list[str]:
    """Of lockstep train."""
    config, *more = options.train
    return [config, "--resume", "--run-dir", f"/runs/{options.name}", "--set", f"mesh.nodes={options.hosts}", *more]


if __name__ == "__main__":
    print(render(parse(sys.argv[1:]), secrets.token_hex(32)), end="")
