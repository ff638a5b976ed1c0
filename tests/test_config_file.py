"""Files, ``extends`` and ``--set``: what is merged, what is refused and in which words, what a resume may change."""

import datetime
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trainer.config import Config
from trainer.config_errors import known_keys, leaves
from trainer.config_file import (
    MAY_DIFFER_ON_RESUME,
    REDACTED,
    check_resume,
    continued,
    differences,
    dump,
    load,
    schema,
)
from trainer.errors import InputRefused, SettingsRefused

COMPLETE = """
[task]
target = "models.vit:ViTClassifier"
[task.args]
depth = 3
widths = [8, 16]
[data]
source = "digits"
global_batch = 8
"""


@pytest.fixture
def write(tmp_path: Path):
    def write(name: str, text: str) -> Path:
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return write


def lines_of(path: Path | str, *overrides: str, search: tuple[Path, ...] = ()) -> list[str]:
    with pytest.raises(SettingsRefused) as caught:
        load(path, overrides, search)
    return str(caught.value).splitlines()


# Reading and merging


def test_defaults_fill_what_the_file_leaves_out(write):
    config = load(write("a.toml", COMPLETE))
    assert config.task.args == {"depth": 3, "widths": (8, 16)}
    assert config.run.num_steps == Config.model_fields["run"].default.num_steps


def test_extends_merges_tables_and_replaces_arrays(write):
    write("shared/base.toml", COMPLETE + "[run]\nname = 'base'\nseed = 1\n")
    write("shared/middle.toml", "extends = 'base.toml'\n[run]\nname = 'middle'\n")
    config = load(write("top.toml", "extends = 'shared/middle.toml'\n[task.args]\nwidths = [1]\nextra = {a = 1}\n"))
    assert config.task.args == {"depth": 3, "widths": (1,), "extra": {"a": 1}}
    assert (config.run.name, config.run.seed) == ("middle", 1)


def test_overrides_come_last_and_in_order(write):
    path = write("a.toml", COMPLETE)
    config = load(
        path,
        [
            "run.seed=1",
            "run.seed = 2 # not 1",
            'run.name="x"',
            "task.args.widths=[1, 2]",
            "task.args.'a.b'.c={d = 'x=y'}",
            "optimizer.clip_norm=inf",
            "optimizer.learning_rate=1",
        ],
    )
    assert (config.run.seed, config.run.name, config.optimizer.clip_norm) == (2, "x", math.inf)
    assert config.task.args == {"depth": 3, "widths": (1, 2), "a.b": {"c": {"d": "x=y"}}}
    assert isinstance(config.optimizer.learning_rate, float)


@pytest.mark.parametrize("name", ["digits_vit", "digits_vit.toml", "configs/digits_vit", "configs/digits_vit.toml"])
def test_a_shipped_configuration_is_found_by_name(write, tmp_path: Path, name: str):
    shipped = write("shipped/digits_vit.toml", COMPLETE).parent
    assert load(name, search=[tmp_path / "absent", shipped]).data.source == "digits"
    own = write("own.toml", f"extends = '{name}'\n[run]\nname = 'own'\n")
    assert load(own, search=[shipped]).run.name == "own"


def test_a_file_here_wins_over_a_shipped_one(write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shipped = write("shipped/a.toml", COMPLETE + "[run]\nname = 'shipped'\n").parent
    write("here/a.toml", COMPLETE + "[run]\nname = 'here'\n")
    monkeypatch.chdir(tmp_path / "here")
    assert load("a", search=[shipped]).run.name == "here"
    assert lines_of(tmp_path / "b/a.toml", search=(shipped,))[0].startswith(f"{tmp_path}/b/a.toml: no such file")


def test_a_byte_order_mark_is_no_error(write):
    assert load(write("a.toml", "\ufeff" + COMPLETE))


# Refusals: (file, overrides, lines). {path} stands for the file.

REFUSALS = [
    pytest.param("[run]\nname = x\n", [], ["{path}, line 2, column 8: not valid TOML: Invalid value"], id="syntax"),
    pytest.param("a = [", [], [r"{path}, at end of document|{path}, end of document: not valid TOML"], id="open array"),
    pytest.param("a = " + "[" * 9999, [], ["{path}.*: not valid TOML: .*"], id="too deep"),
    pytest.param(
        "extends = 3", [], [r"extends = 3: allowed is the name of one file, as a text \({path}\)"], id="extends"
    ),
    pytest.param(
        "extends = 'a.toml'", [], ["{path}: files extend each other in a circle: {path} -> {path}"], id="circle"
    ),
    pytest.param("extends = 'b'", [], [r".*/b: no such file \(extends in {path}\)"], id="no base"),
    pytest.param(
        "",
        [],
        [
            r"task.target: missing; needed is an import path 'package.module:Name' \({path}\)",
            r"data.source: missing; needed is one of \"digits\".*",
            r"data.global_batch: missing; needed is a whole number >= 1.*",
        ],
        id="empty",
    ),
    pytest.param(
        COMPLETE
        + "[run]\nnum_step = 3\nseed = 'x'\n[optimizer]\nbeta1 = 1.5\nschedule = 'cosin'\n[mesh]\nnodes = 0.5\n",
        ["data.lr=1", "debug.digest_every=-1", "mesh.virtual_replicas='all'"],
        [
            r"data.lr = 1: unknown key; did you mean optimizer.learning_rate\? \(--set data.lr=1\)",
            r'run.seed = "x": allowed is a whole number >= 0 and <= 4294967295 \({path}\)',
            r"run.num_step = 3: unknown key; did you mean run.num_steps\? \({path}\)",
            r'optimizer.schedule = "cosin": allowed is one of .*; did you mean "cosine"\? \({path}\)',
            r"optimizer.beta1 = 1.5: allowed is a number >= 0 and < 1 \({path}\)",
            r"mesh.nodes = 0.5: allowed is a whole number >= 1 .* \({path}\)",
            r'mesh.virtual_replicas = "all": allowed is a whole number .*, or "auto" \(--set mesh.virtual_rep.*\)',
            r"debug.digest_every = -1: allowed is a whole number >= 0 .* \(--set debug.digest_every=-1\)",
        ],
        id="all at once",
    ),
    pytest.param(
        COMPLETE + "[debug]\nfaults = [{kind = 'nan', rank = 0, step = 1}, {kind = 'nan', rnk = 0, step = 'x'}]\n",
        [],
        [
            r"debug.faults\[1\].rank: missing; needed is a whole number >= 0 .* \({path}\)",
            r'debug.faults\[1\].step = "x": allowed is a whole number >= 1 .* \({path}\)',
            r"debug.faults\[1\].rnk = 0: unknown key; did you mean debug.faults\[1\].rank\? \({path}\)",
        ],
        id="in an array",
    ),
    pytest.param(
        COMPLETE + "[optimiser]\nlearning_rate = 1\nbeta1 = 0.9\n",
        ["optimiser.eps=1"],
        [
            r"optimiser = .*: unknown table; did you mean optimizer\? \({path}\)",
            r"optimiser.eps = 1: unknown key; did you mean optimizer.eps\? \(--set optimiser.eps=1\)",
        ],
        id="unknown table",
    ),
    pytest.param(
        "learning_rate = 1\n" + COMPLETE,
        ["batch_size=8", "data.zzz=1", "qqq=1", '"a\\nb"=1'],
        [
            r"data.zzz = 1: unknown key; \[data\] has source, global_batch, .*",
            r"learning_rate = 1: unknown key; did you mean optimizer.learning_rate\? \({path}\)",
            r"batch_size = 8: unknown key; did you mean data.global_batch\? .*",
            r"qqq = 1: unknown key; the tables are task, data, .*",
            r'"a\\nb" = 1: unknown key; .*',
        ],
        id="far away",
    ),
    pytest.param(
        COMPLETE,
        ["run=3", "optimizer.frozen=1", "debug.log_example_ids=1", "timeouts.init_seconds=inf", "task.args=nan"],
        [
            r"task.args = nan: allowed is a table .*",
            r"run = 3: allowed is a table \(--set run=3\)",
            r"optimizer.frozen = 1: allowed is a list, each entry a text .*",
            r"timeouts.init_seconds = inf: allowed is a number > 0 and <= 1000000.0, and finite .*",
            r"debug.log_example_ids = 1: allowed is true or false .*",
        ],
        id="types",
    ),
    pytest.param(
        COMPLETE,
        [
            "run.name=x",
            "run.seed=.5",
            "run.seed=True",
            "run.seed",
            "=1",
            "a b=1",
            "run.name=a'b",
            "run.seed=1\nrun.name='x'",
            "extends='b'",
            "run.name=\udcff",
            "[run]\nseed=1",
            "run.seed=",
            "bad=1",
        ],
        [
            r"""--set run.name=x: 'x' is not a TOML value; a text needs quotes .*: --set run.name='"x"'""",
            r"--set run.seed=.5: TOML writes this number as 0.5",
            r"--set run.seed=True: TOML writes true",
            r"--set run.seed: allowed is --set KEY=VALUE, .*",
            r"--set =1: '' is not a key; .*",
            r"--set a b=1: 'a b' is not a key; .*",
            r"--set run.name=a'b: \"a'b\" is not a TOML value; allowed are .*",
            r"--set run.seed=1 run.name='x': .* is not a TOML value; .*",
            r"--set extends='b': only a file can extend another",
            r"--set run.name=\\udcff: .* is not a TOML value; .*",
            r"--set \[run\] seed=1: .* is not a key; .*",
            r"""--set run.seed=: '' is not a TOML value; .*: --set run.seed='""'""",
            r"bad = 1: unknown key; .* \(--set bad=1\)",
        ],
        id="overrides",
    ),
    pytest.param(
        COMPLETE,
        ["optimizer.momentum=0.9", "optimizer.nesterov=true"],
        [
            r"optimizer.momentum = 0.9: adamw would ignore it, because it belongs to sgd; .* \(--set optimizer.mom.*\)",
            r"optimizer.nesterov = true: adamw would ignore it, .* \(--set optimizer.nesterov=true\)",
        ],
        id="ignored",
    ),
    pytest.param(
        COMPLETE,
        [
            "mesh.virtual_replicas=3",
            "debug.faults=[{kind='nan', rank=0, step=2000}]",
            "optimizer.schedule='linear'",
            "optimizer.warmup_steps=2000",
        ],
        [
            r"optimizer.warmup_steps = 2000: the warm-up cannot be longer than run.num_steps = 1000: set that .*",
            r"data.global_batch = 8: must be a multiple of mesh.virtual_replicas = 3, such as 6 or 9 \({path}\)",
            r"debug.faults\[0\].step = 2000: never comes; .* \(--set debug.faults=.*\)",
        ],
        id="tables disagree",
    ),
]


@pytest.mark.parametrize(("text", "overrides", "patterns"), REFUSALS)
def test_every_problem_is_one_line(write, text: str, overrides: list[str], patterns: list[str]):
    path = write("a.toml", text)
    lines = lines_of(path, *overrides)
    assert len(lines) == len(patterns), "\n".join(lines)
    for line, pattern in zip(lines, patterns, strict=True):
        assert re.fullmatch(f"(?:{pattern.replace('{path}', re.escape(str(path)))}).*", line), line
        assert "pydantic" not in line
        assert "Input should" not in line


def test_a_problem_names_the_file_of_the_chain_that_it_is_in(write):
    base = write("base.toml", COMPLETE + "[run]\nseed = -1\n")
    top = write("top.toml", "extends = 'base.toml'\n[run]\nname = '/'\n")
    name_line, seed_line = lines_of(top)
    assert name_line.startswith('run.name = "/"')
    assert name_line.endswith(f"({top})")
    assert seed_line.endswith(f"({base})")


def test_a_missing_key_is_wanted_from_the_file_that_was_named(write):
    write("base.toml", "[task]\ntarget = 'a:b'\n")
    top = write("top.toml", "extends = 'base.toml'\n")
    assert all(line.endswith(f"({top})") for line in lines_of(top, "sync.algorithm='xla'"))


def test_a_long_chain_of_files_is_refused(write):
    write("0.toml", COMPLETE)
    paths = [write(f"{number}.toml", f"extends = '{number - 1}.toml'") for number in range(1, 33)]
    assert load(paths[-2])
    assert lines_of(paths[-1]) == [f"{paths[-1]}: more than 32 files extend one another"]


@pytest.mark.parametrize("depth", [33, 200, 990, 5000])
def test_what_is_nested_too_deeply_is_one_line(write, depth: int):
    names, brackets = ".".join("x" * (depth - 1)), "[" * depth + "]" * depth
    path = write("a.toml", COMPLETE)
    for text in (f"task.args.{names}=1", f"task.args.x={brackets}"):
        (line,) = lines_of(path, text)
        assert line.startswith("--set task.args.x"), line
        assert len(line) < 400
        (line,) = lines_of(write("b.toml", text))
        assert line.startswith(f"{path.parent / 'b.toml'}"), line


def test_values_may_be_nested(write):
    config = load(write("a.toml", COMPLETE), ["task.args." + ".".join("x" * 30) + "=1"])
    assert load(write("b.toml", dump(config))) == config


def test_a_value_that_becomes_a_table_is_blamed_on_what_made_it_one(write):
    path = write("a.toml", COMPLETE + "[run]\nnum_steps = 3\n")
    assert lines_of(path, "run.num_steps.x=5")[0].endswith("(--set run.num_steps.x=5)")
    (line,) = lines_of(path, "task.args.y={z=nan}")
    assert line.startswith("task.args.y.z = nan: ")
    assert line.endswith("(--set task.args.y={z=nan})")


def test_a_longer_circle_is_refused(write):
    write("a.toml", "extends = 'b.toml'")
    write("b.toml", "extends = 'sub/../c.toml'")
    write("sub/x.toml", "")
    assert "circle" in lines_of(write("c.toml", "extends = 'a.toml'"))[0]


def test_unreadable_files_are_one_line(write, tmp_path: Path):
    (tmp_path / "latin.toml").write_bytes(b"[run]\nname = '\xe9'\n")
    shipped = write("shipped/digits_vit.toml", COMPLETE).parent
    assert lines_of(tmp_path) == [f"{tmp_path}: is a directory; give a TOML file"]
    assert lines_of(tmp_path / "latin.toml") == [f"{tmp_path}/latin.toml: is not UTF-8, which TOML must be (byte 14)"]
    assert lines_of("digits_vti", search=(shipped,)) == [
        "digits_vti: no such file; did you mean digits_vit?; shipped are digits_vit"
    ]
    assert lines_of("absent", "run.name=x")[0] == "absent: no such file"
    assert lines_of("absent", "run.name=x")[1].startswith("--set run.name=x")
    assert len(lines_of("x" * 9999)) == 1


def test_nearest_finds_every_key_with_one_letter_missing(write):
    path = write("a.toml", COMPLETE)
    for key in known_keys():
        if len(key) == 2 and len(str(key[1])) > 4:
            misspelt = f"{key[0]}.{str(key[1])[:2]}{str(key[1])[3:]}"
            assert f"; did you mean {key[0]}.{key[1]}?" in lines_of(path, f"{misspelt}=1")[0]


@pytest.mark.parametrize(
    ("unknown", "words"),
    [
        ("name", "did you mean run.name or optimizer.name?"),
        ("every_step", "did you mean checkpoint.every_steps?"),
        ("run.eval_steps", "did you mean run.eval_every_steps?"),
        ("observe.every_steps", "did you mean observe.log_every_steps?"),
        ("run.learning_rate", "did you mean optimizer.learning_rate?"),
        ("mesh.virtual", "did you mean mesh.virtual_replicas?"),
    ],
)
def test_nearest_prefers_the_like_name_and_then_the_like_table(write, unknown: str, words: str):
    assert words in lines_of(write("a.toml", COMPLETE), f"{unknown}=1")[0]


# Writing

ROUND_TRIPS: list[list[str]] = [
    [],
    ["optimizer.clip_norm=1e-300", "optimizer.learning_rate=0.1", "optimizer.frozen=['a/*', 'b']"],
    ["task.args={a = inf, b = -0.0, c = [], d = {}, e = [[1], [{x = 1}]], f = 12345678901234567890, g = 1.0}"],
    ["task.args.text='''quotes \" and \\ and\nlines and \u00e9'''", "task.args.'odd key.'=true"],
    ["task.args.when=2024-02-29T12:00:00.5+02:00", "task.args.day=2024-02-29", "task.args.hour=07:30:00"],
    ["debug.faults=[{kind='nan', rank=1, step=3}, {kind='nan', rank=0, step=9, num_steps=2}]"],
    [
        "mesh.virtual_replicas=4",
        "mesh.devices_per_node=2",
        "optimizer.name='optax:sgd'",
        "optimizer.args={momentum=0.5}",
    ],
]


@pytest.mark.parametrize("overrides", ROUND_TRIPS)
def test_what_is_dumped_loads_as_an_equal_tree(write, overrides: list[str]):
    config = load(write("a.toml", COMPLETE), overrides)
    again = load(write("b.toml", dump(config)))
    assert again == config
    assert dump(again) == dump(config)  # 1 == 1.0 == True, but they are written differently
    assert differences(again, config) == []


def test_a_tree_made_in_python_round_trips(write):
    args = {"t": (1, (2.5,)), "l": [1], "d": datetime.date(2024, 1, 1)}
    tree = {"task": {"target": "a:b", "args": args}, "data": {"source": "text", "global_batch": 1}}
    config = Config.model_validate(tree)
    assert load(write("a.toml", dump(config))) == config


def test_the_dump_holds_every_key(write):
    text = dump(load(write("a.toml", COMPLETE)))
    assert all(str(key[-1]) in text for key in known_keys() if "faults" not in key[:-1])


SECRETS = ("db_password", "dbpassword", "x-api-key", "apiKey", "APIKey", "AWS_SECRET_ACCESS_KEY", "awsSecretKey")
SECRETS += ("private_key", "auth_token", "accessToken", "api_token", "hf_token", "GITHUB_TOKEN")
SECRETS += ("wandb_key", "slack_token", "ssh-key", "openaiKey")
ORDINARY = ("label_key", "pad_token", "mask_token", "image_key", "sort_key", "labelKey", "tokens", "monkey")


def test_an_ordinary_key_or_token_may_not_change_on_resume(write):
    path = write("a.toml", COMPLETE)
    saved = load(path, ["data.args.label_key='a'"])
    with pytest.raises(InputRefused, match=r'data\.args\.label_key = "b": the run was started with "a"'):
        check_resume(saved, load(path, ["data.args.label_key='b'"]))


def test_secrets_are_redacted_and_nothing_else(write):
    secret = "hunter2"
    config = load(
        write("a.toml", COMPLETE),
        [f"data.args.{key}='{secret}'" for key in ("token", "api_key", "PASSWORD", "client_secret", "deep.key")]
        + [f"data.args.secrets.{key}='{secret}'" for key in SECRETS]
        + [f"data.args.ordinary.{key}='kept'" for key in ORDINARY]
        + [f"data.args.list=[{{key='{secret}'}}]", "data.args.empty_key=''", "data.args.num_token=3"]
        + ["data.args.keys='kept'", f"task.args.token=['{secret}']"],
    )
    text = dump(config, redact=True)
    assert secret not in text
    redacted = load(write("b.toml", text))
    assert redacted.data.args == {
        "token": REDACTED,
        "api_key": REDACTED,
        "PASSWORD": REDACTED,
        "client_secret": REDACTED,
        "deep": {"key": REDACTED},
        "list": ({"key": REDACTED},),
        "empty_key": "",
        "num_token": 3,
        "keys": "kept",
        "secrets": dict.fromkeys(SECRETS, REDACTED),
        "ordinary": dict.fromkeys(ORDINARY, "kept"),
    }
    assert redacted.task.args["token"] == (REDACTED,)
    assert secret in dump(config)
    check_resume(redacted, config)


def test_the_schema_is_strict_json_with_every_key_described():
    text = json.dumps(schema(), allow_nan=False)
    whole = json.loads(text)
    assert whole["title"] == "Lockstep settings"
    assert "extends" in whole["properties"]
    assert whole["additionalProperties"] is False
    for name, table in whole["$defs"].items():
        assert table["additionalProperties"] is False
        assert all("description" in node for node in table["properties"].values()), name


def test_the_schema_asks_for_needed_keys_only_without_extends():
    whole = schema()
    assert "required" not in whole
    assert "required" not in whole["$defs"]["Data"]
    assert whole["if"] == {"not": {"required": ["extends"]}}
    assert whole["then"]["required"] == ["task", "data"]
    assert whole["then"]["properties"]["data"]["required"] == ["source", "global_batch"]
    assert whole["$defs"]["Fault"]["required"] == ["kind", "rank"]


def test_making_a_schema_leaves_the_refusals_alone(write):
    schema()
    assert len(lines_of(write("a.toml", ""))) == 3


# Resuming


def test_differences_name_key_saved_and_now(write):
    saved = load(write("a.toml", COMPLETE))
    now = load(write("a.toml", COMPLETE), ["run.seed=1", "task.args.depth=4", "task.args.new.x=1"])
    assert differences(saved, now) == [
        ("task.args.depth", 3, 4),
        ("run.seed", 0, 1),
        ("task.args.new.x", None, 1),
    ]
    assert ("task.args.new.x", 1, None) in differences(now, saved)
    assert differences(saved, saved) == []


@pytest.mark.parametrize(
    ("one", "other"),
    [("1", "1.0"), ("1", "true"), ("[1]", "[true]"), ("[{x=1}]", "[{x=1.0}]"), ("{}", "1"), ("[]", "{}"), ("''", "[]")],
)
def test_values_of_other_types_differ(write, one: str, other: str):
    path = write("a.toml", COMPLETE)
    first, second = (load(path, [f"task.args.x={value}"]) for value in (one, other))
    assert len(differences(first, second)) == 1
    assert differences(first, first) == []
    assert len(differences(load(path), first)) == 1


CHANGES: dict[str, Any] = {
    "run.name": '"other"',
    "run.num_steps": "7",
    "run.eval_every_steps": "7",
    "data.num_threads": "7",
    "data.prefetch_batches": "7",
    "optimizer.accumulate_steps": "2",
    "optimizer.max_consecutive_skips": "7",
    "mesh.nodes": "2",
    "mesh.devices_per_node": "2",
    "mesh.platform": '"cpu"',
    "sync.profile": '"links.json"',
    "sync.mapping": '"pmap"',
    "timeouts.init_seconds": "7",
    "checkpoint.every_steps": "7",
    "observe.log_every_steps": "7",
    "debug.faults": "[{kind='nan', rank=0, step=1}]",
}
MUST_STAY = {
    "task.args.depth": "4",
    "data.source": '"text"',
    "data.global_batch": "16",
    "data.args.x": "1",
    "run.seed": "1",
    "optimizer.learning_rate": "0.5",
    "optimizer.frozen": "['x']",
    "sync.algorithm": '"xla"',
    "mesh.virtual_replicas": "8",
}


def resumed(write, **changes: str) -> tuple[Config, Config]:
    start = ["mesh.virtual_replicas=4"]
    path = write("a.toml", COMPLETE)
    return load(path, start), load(path, [*start, *(f"{key}={value}" for key, value in changes.items())])


@pytest.mark.parametrize("key", CHANGES)
def test_a_resume_may_change(write, key: str):
    saved, now = resumed(write, **{key: CHANGES[key]})
    assert [name for name, _, _ in differences(saved, now)] == [key]
    check_resume(saved, now)


def test_all_of_the_documented_list_is_tried():
    assert {key if key in CHANGES else f"{key.partition('.')[0]}." for key in MAY_DIFFER_ON_RESUME} <= {
        *CHANGES,
        "timeouts.",
        "checkpoint.",
        "observe.",
        "debug.",
    }


@pytest.mark.parametrize("key", MUST_STAY)
def test_a_resume_may_not_change(write, key: str):
    saved, now = resumed(write, **{key: MUST_STAY[key]})
    with pytest.raises(InputRefused, match=f"(?m)^  {re.escape(key)} = "):
        check_resume(saved, now)


def test_all_refused_changes_are_named(write):
    saved, now = resumed(write, **MUST_STAY, **CHANGES)
    with pytest.raises(InputRefused) as caught:
        check_resume(saved, now)
    matter, *refused, own_settings, new_run = str(caught.value).splitlines()
    assert matter == f"a resumed run must keep the settings it was started with, and {len(MUST_STAY)} differ:"
    assert len(refused) == len(MUST_STAY)
    assert "  task.args.depth = 4: the run was started with 3" in refused
    assert "without CONFIG" in own_settings
    assert "--init-from" in new_run


def test_a_list_of_refused_changes_is_bounded(write):
    saved, now = resumed(write, **{f"task.args.x{number}": "1" for number in range(12)})
    with pytest.raises(InputRefused, match="and 12 differ:") as caught:
        check_resume(saved, now)
    assert [line for line in str(caught.value).splitlines() if line.startswith("  and ")] == ["  and 2 more"]
    assert len(str(caught.value).splitlines()) == 1 + 10 + 1 + 2


def test_auto_means_the_number_of_virtual_replicas_that_the_run_has(write):
    saved, _ = resumed(write)
    auto = load(write("a.toml", COMPLETE))
    check_resume(saved, auto)
    with pytest.raises(InputRefused, match=r'mesh\.virtual_replicas = 4: the run was started with "auto"'):
        check_resume(auto, saved)


def test_continued_keeps_the_virtual_replicas_and_takes_the_rest(write):
    saved, _ = resumed(write)
    now = load(write("a.toml", COMPLETE), ["run.num_steps=7", "mesh.nodes=2"])
    assert differences(saved, continued(saved, now)) == [("run.num_steps", 1000, 7), ("mesh.nodes", 1, 2)]
    with pytest.raises(InputRefused, match=r"run\.seed = 1"):
        continued(saved, load(write("a.toml", COMPLETE), ["run.seed=1"]))


def test_continued_refuses_devices_that_cannot_share_the_virtual_replicas(write):
    saved, _ = resumed(write)
    now = load(write("a.toml", COMPLETE), ["mesh.nodes=3", "mesh.devices_per_node=1"])
    with pytest.raises(SettingsRefused, match=r"virtual_replicas = 4, which 3 replicas .*: 1, 2, 4$"):
        continued(saved, now)


def test_leaves_are_all_values_and_empty_tables():
    assert list(leaves({"a": {"b": 1, "c": {}}, "d": [1]})) == [(("a", "b"), 1), (("a", "c"), {}), (("d",), [1])]


def test_reading_settings_loads_neither_jax_nor_numpy():
    code = (
        "import sys, trainer.config_file; print([name for name in ('jax', 'jaxlib', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
