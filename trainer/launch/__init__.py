"""Starting and ending the processes of a run: ``agent`` watches, ``worker`` works. Only the worker loads JAX."""
