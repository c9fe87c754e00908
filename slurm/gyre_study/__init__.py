"""Studies of Gyre's programs: plan, launch, collect, report, compare. The commands are in cli.py."""
