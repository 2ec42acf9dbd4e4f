"""`python -m replicax`, the same as `replicax`."""

from replicax._command_line import main

if __name__ == "__main__":
    main(prog_name="python -m replicax")
