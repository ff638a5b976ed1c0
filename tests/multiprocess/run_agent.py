"""Runs an agent as its own process: ``python run_agent.py JOB_AS_JSON``. Ends with 99 if the agent loaded JAX."""

import json
import sys

from trainer.launch import agent
from trainer.launch.spec import Job

if __name__ == "__main__":
    code = agent.run(Job(**json.loads(sys.argv[1])))
    sys.exit(99 if "jax" in sys.modules else code)
