"""Every test process has eight emulated CPU devices; a test never skips for lack of them."""

import os
import signal

os.environ["JAX_PLATFORMS"] = "cpu"

import jax

jax.config.update("jax_num_cpu_devices", 8)

# Tests send these to processes that they start, and what is ignored here, as under nohup, would be ignored there too.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, handler)
