"""Every test process has eight emulated CPU devices; a test never skips for lack of them."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"

import jax

jax.config.update("jax_num_cpu_devices", 8)
