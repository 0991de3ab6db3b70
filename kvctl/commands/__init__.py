"""The commands of kvctl, one module each, found by `kvctl.cli.discovery`.

To add one, write ``kvctl/commands/NAME.py`` with a ``SECTION`` and a function NAME, whose first parameter is
``settings: Settings`` where it takes the common options; its document and how that looks go to ``kvctl/views/NAME.py``.
``make completions`` writes the shells' scripts anew.
"""
