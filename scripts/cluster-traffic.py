#!/usr/bin/env python3
"""Traffic between pods of scripts/cluster, and what of it was lost.

usage: traffic serve [ADDRESS...]         echoes UDP and TCP on port 7000, and says who asks on 7001
       traffic send ADDRESS SECONDS       1,000 datagrams a second and 20 connections; prints JSON
       traffic peer ADDRESS [PORT] [udp]  the address that the server sees
"""

import itertools
import json
import os
import selectors
import socket
import sys
import time

ECHO, WHO = 7000, 7001
RATE_PPS = 1000
# After a pause of its own the sender catches up in some milliseconds, not at once.
BURST_MAX = 16
CONNECTIONS = 20
# Each connection asks this often; an answer that takes longer than the rest waits for TCP's timer.
ASK_S = 0.1
# For what is still on its way at the end.
GRACE_S = 2.0
# Ends a sender before its time.
STOP = "/tmp/stop"


def family(address):
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def bound(address, port, kind):
    place = socket.socket(family(address), kind)
    if place.family == socket.AF_INET6:
        place.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(kind == socket.SOCK_STREAM))
    place.bind((address, port))
    return place


def serve(addresses):
    watched = selectors.DefaultSelector()
    for address, port in itertools.product(addresses, (ECHO, WHO)):
        datagrams = bound(address, port, socket.SOCK_DGRAM)
        datagrams.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        watched.register(datagrams, selectors.EVENT_READ, ("udp", port))
        listener = bound(address, port, socket.SOCK_STREAM)
        listener.listen(64)
        watched.register(listener, selectors.EVENT_READ, ("listen", port))
    while True:
        for key, _ in watched.select():
            kind, port = key.data
            try:
                answer(watched, key.fileobj, kind, port)
            except OSError:
                if kind == "tcp":
                    watched.unregister(key.fileobj)
                    key.fileobj.close()


def answer(watched, place, kind, port):
    if kind == "udp":
        data, sender = place.recvfrom(2048)
        place.sendto(sender[0].encode() if port == WHO else data, sender)
    elif kind == "listen":
        connection, sender = place.accept()
        if port == WHO:
            connection.sendall(sender[0].encode())
            connection.close()
        else:
            watched.register(connection, selectors.EVENT_READ, ("tcp", port))
    else:
        data = place.recv(2048)
        if not data:
            raise OSError("ended")
        place.sendall(data)


class Connections:
    """Each sends a number and waits for it before it sends the next."""

    def __init__(self, address):
        self.open = {}
        self.asked = self.answered = self.resets = 0
        self.slowest_s = 0.0
        for _ in range(CONNECTIONS):
            connection = socket.create_connection((address, ECHO), timeout=5)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setblocking(False)
            self.open[connection] = 0.0

    def ask(self, now):
        for connection, waits_since in list(self.open.items()):
            if waits_since == 0.0:
                try:
                    connection.send(b"%16d" % self.asked)
                    self.asked += 1
                    self.open[connection] = now
                except OSError:
                    self.lose(connection)

    def listen(self, now):
        for connection, waits_since in list(self.open.items()):
            if waits_since == 0.0:
                continue
            try:
                if not connection.recv(64):
                    raise ConnectionResetError
                self.answered += 1
                self.slowest_s = max(self.slowest_s, now - waits_since)
                self.open[connection] = 0.0
            except BlockingIOError:
                pass
            except OSError:
                self.lose(connection)

    def lose(self, connection):
        self.resets += 1
        del self.open[connection]
        connection.close()


def send(address, seconds):
    connections = Connections(address)
    datagrams = socket.socket(family(address), socket.SOCK_DGRAM)
    datagrams.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
    datagrams.connect((address, ECHO))
    datagrams.setblocking(False)
    begin = time.monotonic()
    sent = refused = 0
    seen = set()
    next_ask = begin
    while True:
        now = time.monotonic()
        elapsed = now - begin
        if elapsed > seconds + GRACE_S:
            break
        if elapsed < seconds:
            due = min(elapsed * RATE_PPS, sent + BURST_MAX)
            while sent < due:
                try:
                    datagrams.send(b"%12d" % sent + bytes(52))
                except OSError:
                    refused += 1
                sent += 1
            if now >= next_ask:
                connections.ask(now)
                next_ask = now + ASK_S
                if os.path.exists(STOP):
                    seconds = elapsed
        while True:
            try:
                seen.add(int(datagrams.recv(128)[:12]))
            except BlockingIOError:
                break
            except OSError:
                refused += 1
        connections.listen(now)
        time.sleep(0.001)
    missing = [number for number in range(sent) if number not in seen]
    in_a_row = longest = 0
    for number in range(sent):
        in_a_row = 0 if number in seen else in_a_row + 1
        longest = max(longest, in_a_row)
    print(json.dumps({
        "sent": sent,
        "lost": len(missing),
        "refused": refused,
        "first_lost_s": round(missing[0] / RATE_PPS, 3) if missing else None,
        "last_lost_s": round(missing[-1] / RATE_PPS, 3) if missing else None,
        "longest_lost_s": round(longest / RATE_PPS, 3),
        "resets": connections.resets,
        "unanswered": connections.asked - connections.answered,
        "slowest_s": round(connections.slowest_s, 3),
    }))


def peer(address, port, kind):
    if kind == "udp":
        place = socket.socket(family(address), socket.SOCK_DGRAM)
        place.settimeout(3)
        place.sendto(b"?", (address, port))
        print(place.recv(64).decode())
    else:
        place = socket.create_connection((address, port), timeout=3)
        print(place.recv(64).decode())


def main():
    words = sys.argv[1:]
    if words[:1] == ["serve"]:
        serve(words[1:] or ["0.0.0.0", "::"])
    elif len(words) == 3 and words[0] == "send":
        send(words[1], float(words[2]))
    elif len(words) in (2, 3, 4) and words[0] == "peer":
        kind = words[3] if len(words) == 4 else "tcp"
        peer(words[1], int(words[2]) if len(words) > 2 else WHO, kind)
    else:
        sys.exit(__doc__)


main()
