"""The socket of events: who subscribed to what, and how much of it waits for each."""

from __future__ import annotations

import logging
from collections import Counter

from kvd.service.sockets.channel import Channel, ChannelEnd
from kvd.service.sockets.limits import EVENTS_UNSENT_BYTES, MAX_TOPICS
from kvd.service.sockets.reservations import Hold
from kvd.zmtp.events import Received, Subscribed, Unsubscribed
from kvd.zmtp.frames import buffers

log = logging.getLogger(__name__)


class Publisher:
    """Sends each event to those that want what its topic begins with.

    Who reads slowly loses events, and who reads nothing its connection: see `Unsent`, which bounds what waits in all.
    """

    def __init__(self, counters: Counter[str]) -> None:
        self._counters = counters
        self._topics: dict[Channel, Counter[bytes]] = {}
        self._readers: dict[bytes, dict[Channel, None]] = {}

    @property
    def wanted(self) -> bool:
        """Somebody subscribed to something."""
        return bool(self._readers)

    def publish(self, topic: bytes, body: bytes) -> None:
        """Send one event. Never waits, and makes no call to the kernel: connections send it in their turns."""
        readers: dict[Channel, None] = {}
        for end in range(len(topic) + 1):
            if found := self._readers.get(topic[:end]):
                readers |= found
        if not readers:
            return
        message = b"".join(buffers(topic, body))
        for channel in readers:
            if channel.unsent + len(message) > EVENTS_UNSENT_BYTES:
                self._counters["sent.events_lost"] += 1
            else:
                channel.post(message)

    def joined(self, channel: Channel) -> None:
        """It has not subscribed to anything yet."""
        self._topics[channel] = Counter()

    def received(self, _channel: Channel, _message: Received, hold: Hold | None) -> None:
        """A subscriber has nothing to say."""
        if hold is not None:
            hold.release()

    def subscribed(self, channel: Channel, event: Subscribed | Unsubscribed) -> None:
        """A topic may be subscribed to several times, and is wanted until it was given up as often."""
        topics = self._topics[channel]
        if isinstance(event, Subscribed):
            if len(topics) >= MAX_TOPICS and event.topic not in topics:
                self._counters["connections.events.too_many_topics"] += 1
                channel.end()
                return
            topics[event.topic] += 1
            self._readers.setdefault(event.topic, {})[channel] = None
        elif event.topic in topics:
            topics[event.topic] -= 1
            if not topics[event.topic]:
                del topics[event.topic]
                self._forget(channel, event.topic)

    def left(self, channel: Channel, cause: ChannelEnd) -> None:
        """It wants nothing any more."""
        if cause == "unread":
            log.info("events socket: a reader does not read what is sent to it (pid %d)", channel.pid)
        for topic in self._topics.pop(channel):
            self._forget(channel, topic)

    def _forget(self, channel: Channel, topic: bytes) -> None:
        readers = self._readers[topic]
        del readers[channel]
        if not readers:
            del self._readers[topic]
