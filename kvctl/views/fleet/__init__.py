"""What --fleet shows: the documents of single hosts with the host at each item, and the hosts that did not answer."""
