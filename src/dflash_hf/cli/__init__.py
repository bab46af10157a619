"""The command line: one file per subcommand, all of them thin."""
