"""`python -m cfkv`, which is how launchers start a process."""

from cfkv.cli import main

main()
