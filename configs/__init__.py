"""The shipped configurations, as data: ``importlib.resources.files("configs") / "digits_vit.toml"``."""
