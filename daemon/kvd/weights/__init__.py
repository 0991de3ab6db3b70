"""Which weights a folder holds: fingerprints of checkpoints and adapters, from their files alone.

Stands on nothing of kvd and needs neither torch nor vLLM. Nothing here runs code of a file: headers of safetensors and
JSON are parsed within bounds, all else is taken as bytes.
"""
