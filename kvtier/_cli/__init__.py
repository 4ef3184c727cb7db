"""The command line. Its commands come from other distributions."""
