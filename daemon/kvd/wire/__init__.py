"""The wire: message structs, framing, versions, keys.

Pure: msgspec and zmq constants only, no sockets opened here.
"""
