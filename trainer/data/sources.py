"""The data sources by name, and how the settings open one.

A source is a class, or a function, that is called with ``split="train"`` or ``"test"`` and the keywords of
``[data.args]``, and returns a ``Source``. One of your own is named by import path and works alike.
"""

from trainer.config import Data
from trainer.data.source import Source, Split
from trainer.errors import SettingsRefused
from trainer.import_path import call, load

SOURCES = {
    "digits": "trainer.data.digits:digits",
    "text": "trainer.data.text:text",
    "npz": "trainer.data.npz:npz",
    "tokens": "trainer.data.tokens:tokens",
    "images": "trainer.data.images:images",
    "arrayrecord": "trainer.data.arrayrecord:arrayrecord",
    "synthetic": "trainer.data.synthetic:synthetic",
}
"""``config.SourceName`` -> import path. Only the source that is used is imported: some bring large libraries."""


def open_source(data: Data, split: Split) -> Source:
    """Returns the examples of ``split``; a test split may be empty, and evaluation then refuses it.

    Raises SettingsRefused (no such source, or wrong keywords) or InputRefused (missing or damaged data).
    """
    factory = load(SOURCES.get(data.source, data.source), "data.source")
    if not callable(factory):
        raise SettingsRefused(f"data.source = {data.source!r} is no class or function, but {type(factory).__name__}")
    source = call(factory, "data.args", data.args, split=split)
    if not isinstance(source, Source):
        raise SettingsRefused(
            f"data.source = {data.source!r} gave {type(source).__name__}, which lacks __len__ or __getitem__"
        )
    return source
