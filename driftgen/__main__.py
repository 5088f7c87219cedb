from driftgen.cli import main

main()
