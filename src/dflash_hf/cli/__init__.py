"""This package is the command line, with one file per subcommand. The subcommands leave the work to other packages."""
