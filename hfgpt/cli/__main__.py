from hfgpt.cli import main

main()
