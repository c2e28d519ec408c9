"""`python -m hfgpt.cli`, as `accelerate launch --module` starts it."""

from hfgpt.cli import main

main()
