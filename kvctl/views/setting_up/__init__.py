"""Documents of the commands that set a host up."""
