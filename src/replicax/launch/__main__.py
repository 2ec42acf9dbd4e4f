"""`python -m replicax.launch`, the same as `replicax launch`."""

from replicax.launch._command import launch_command

if __name__ == "__main__":
    launch_command(prog_name="python -m replicax.launch")
