"""What is known of each worker from outside, when that is too little, who is to blame, and how to end in time.

``progress``   the marks that a worker leaves in shared memory, and the command it finds there
``policy``     who is stuck, from the marks of all ranks and a clock: pure
``preemption`` at which step all stop that were asked to end: pure
``wording``    what is said about it
``faults``     failures that are staged
"""
