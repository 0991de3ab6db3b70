"""Peer engines, as a worker knows them: asked for, followed, probed, and watched for slow paths."""
