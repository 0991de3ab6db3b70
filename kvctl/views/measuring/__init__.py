"""Documents of the commands that measure, and the bars that they are drawn as."""
