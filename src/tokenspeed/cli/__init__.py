"""The command line. Its start-up path imports only the standard library."""
