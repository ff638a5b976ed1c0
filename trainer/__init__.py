"""Lockstep: data-parallel training for JAX on many hosts, with the gradient exchange at its heart."""
