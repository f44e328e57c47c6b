"""Runs the cells of a plan: in this process, or in worker processes of this machine."""
