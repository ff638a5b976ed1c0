"""A log gets whole plain lines, a terminal gets one live line, and the terminal is given back as it was."""

import inspect
import io
import re
import sys
from contextlib import nullcontext

import pytest
from rich.console import Console

from trainer.display import Display, Facts, NullDisplay, Summary, banner

ESCAPE = "\x1b"
LONG = "runs/[red]odd:smile:" + "x" * 300

FACTS = Facts(
    name="digits_vit",
    model="models.vit:ViTClassifier",
    num_params=123456,
    global_batch=48,
    process_batch=24,
    replica_batch=6,
    virtual_replica_batch=3,
    num_virtual_replicas=16,
    platform="cpu",
    device_kind="Host CPU",
    num_nodes=2,
    devices_per_node=4,
    num_processes=2,
    algorithm="xla",
    exchanged_bytes=3 * 2**19,
    num_steps=600,
    num_epochs=20.04,
    optimizer="adamw",
    schedule="cosine from 0.001",
    run_directory=LONG,
)
ROW = {
    "kind": "train",
    "step": 100,
    "loss": 0.123456,
    "accuracy": 0.5,
    "grad_norm": 2.5,
    "step_seconds": 0.5,
    "examples_per_second": 1234.5,
}
SUMMARY = Summary(600, 61.0, 0.0567, 1120.0, {"loss": 0.1, "accuracy": 0.98}, {"accuracy": 0.985}, LONG, "m.jsonl")


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch):
    """Rich obeys these; a test must not depend on where it runs."""
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS", "LINES", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")


def _console(terminal, width=80):
    return Console(file=io.StringIO(), force_terminal=terminal, width=width)


def _shown(console):
    return console.file.getvalue()


def _show_everything(display):
    display.banner(FACTS)
    display.compiled(12.3, 2**29)
    display.row(ROW | {"step": 1})
    display.row(ROW)
    display.evaluation({"kind": "eval", "step": 100, "attempt": 1, "examples": 21, "loss": None, "accuracy": 0.97})
    display.saved(100, 0.321)
    display.note("a note")
    display.warning("a warning about [bold]" + "y" * 200)
    display.summary(SUMMARY)


def test_a_log_has_one_plain_unwrapped_line_each():
    console = _console(terminal=False, width=40)
    with Display(console, num_steps=600) as display:
        _show_everything(display)
    text = _shown(console)
    assert ESCAPE not in text
    assert "\r" not in text
    lines = text.splitlines()
    assert lines[8:16] == [
        "compiled in 12.3 s, 512.0 MiB of memory per device",
        "first step, with compilation: 12.8 s",
        "step 1/600  loss 0.1235  accuracy 0.5  (grad_norm 2.5)",
        "step 100/600  loss 0.1235  accuracy 0.5  1,234 examples/s  4:10 left  (grad_norm 2.5, 500.0 ms a step)",
        "step 100  evaluation on 21 examples: loss non-finite  accuracy 0.97",
        "step 100  checkpoint saved in 321.0 ms",
        "a note",
        "warning: a warning about [bold]" + "y" * 200,
    ]


def test_the_banner_states_the_facts():
    lines = [re.sub(" +", " ", line.strip()) for line in banner(FACTS).plain.splitlines()]
    assert lines == [
        "digits_vit",
        "model models.vit:ViTClassifier, 123,456 parameters",
        "batch 48 global = 2 processes x 24 = 8 replicas x 6 = 16 virtual replicas x 3",
        "devices 8 x Host CPU (cpu) = 2 nodes x 4 local",
        "exchange xla, 1.5 MiB per replica and step",
        "length 600 steps = 20.04 epochs",
        "optimizer adamw, cosine from 0.001",
        f"run {LONG}, attempt 1",
    ]
    resumed = banner(FACTS._replace(attempt=3, resumed_step=1300)).plain
    assert resumed.endswith("attempt 3, resumed from step 1,300")


def test_the_summary_states_what_and_where():
    console = _console(terminal=False)
    Display(console, 600).summary(SUMMARY)
    lines = [re.sub(" +", " ", line.strip()) for line in _shown(console).splitlines()]
    assert lines == [
        "done after 600 steps",
        "final loss 0.1 accuracy 0.98",
        "best accuracy 0.985",
        "time 1:01 in all, 56.7 ms a step, 1,120 examples/s",
        f"checkpoint {LONG}",
        "metrics m.jsonl",
    ]
    Display(console, 600).summary(SUMMARY._replace(best={}, checkpoint=None, final={}))
    assert "best" not in _shown(console).split("done")[-1]
    assert re.search(r"checkpoint +none", _shown(console))


def test_compiled_without_known_memory():
    console = _console(terminal=False)
    Display(console, 600).compiled(0.25, None)
    assert _shown(console) == "compiled in 250.0 ms\n"


def test_time_left_is_told_from_the_second_row_on():
    """At the rate of the step that warms up it would be nonsense; on a terminal as in a log, also of a resumed run."""
    for terminal in (False, True):
        console = _console(terminal)
        with Display(console, num_steps=600) as display:
            for step in (301, 400):
                display.compiled(1.0, None)
                display.row(ROW | {"step": step, "step_seconds": 9.0})
                assert " left" not in _shown(console)
                assert "examples/s" not in _shown(console)
            display.row(ROW | {"step": 500})
        assert "step 500/600  loss 0.1235  accuracy 0.5  1,234 examples/s  0:50 left" in _shown(console)


def test_a_terminal_has_one_live_line_that_fits():
    console = _console(terminal=True)
    with Display(console, 600) as display:
        for step in (100, 200, 600):
            display.row(ROW | {"step": step})
    text = _shown(console)
    assert text.count("\n") == 1
    assert text.count("\r") >= 3
    assert "step 200/600  loss 0.1235  accuracy 0.5  1,234 examples/s  3:20 left" in text
    assert "0:00 left" in text


def test_a_dumb_terminal_gets_plain_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    console = _console(terminal=True)
    with Display(console, 600) as display:
        display.row(ROW)
    assert "\r" not in _shown(console)
    assert "4:10 left" in _shown(console)


@pytest.mark.parametrize("fails", [False, True])
def test_the_terminal_is_given_back(fails):
    streams = sys.stdout, sys.stderr
    console = _console(terminal=True)
    with pytest.raises(ZeroDivisionError) if fails else nullcontext(), Display(console, 600) as display:
        display.row(ROW)
        hidden, shown = _shown(console).rfind(f"{ESCAPE}[?25l"), _shown(console).rfind(f"{ESCAPE}[?25h")
        assert shown > hidden >= 0, "a killed process would leave the cursor hidden"
        if fails:
            1 / 0  # noqa: B018 - the failure is the point
    assert (sys.stdout, sys.stderr) == streams
    assert _shown(console).endswith(f"{ESCAPE}[?25h")
    display.close()
    display.note("still works")
    assert "still works" in _shown(console)


def test_null_display_has_every_method_and_is_silent(capfd):
    def methods(kind):
        return {name: inspect.signature(value) for name, value in vars(kind).items() if not name.startswith("_")}

    with NullDisplay() as display:
        assert all(hasattr(display, name) for name in methods(Display))
        _show_everything(display)
    assert capfd.readouterr() == ("", "")
