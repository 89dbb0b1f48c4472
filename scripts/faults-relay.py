"""Carries frames between two interfaces, and does to those from one of them what it is told.

With --claim it only says once, by ARP on the first one, that an address is there.
"""

import argparse
import heapq
import random
import select
import socket
import time

ETH_P_ALL = 3
UDP = 17
HEADERS = 14 + 20 + 8

parser = argparse.ArgumentParser()
parser.add_argument("interfaces", nargs=2)
parser.add_argument("--from", dest="source", help="only frames that come from this interface")
parser.add_argument("--claim", metavar="ADDRESS")
parser.add_argument("--delay-ms", type=float, default=0)
for effect in ("lose", "corrupt", "duplicate", "reorder"):
    parser.add_argument("--" + effect, type=float, default=0, help="percent of the frames")
options = parser.parse_args()

sockets = []
for name in options.interfaces:
    end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
    end.bind((name, 0))
    sockets.append(end)

if options.claim:
    hardware = sockets[0].getsockname()[4]
    address = socket.inet_aton(options.claim)
    arp = b"\0\1\x08\0\6\4\0\1" + hardware + address + b"\0" * 6 + address
    sockets[0].send(b"\xff" * 6 + hardware + b"\x08\x06" + arp)
    raise SystemExit


def happens(percent):
    return random.random() * 100 < percent


def send(out, frame):
    try:
        sockets[out].send(frame)
    except OSError:  # the interface is down: so is the wire
        pass


waiting, count = [], 0
while True:
    until = max(0, waiting[0][0] - time.monotonic()) if waiting else None
    for ready in select.select(sockets, [], [], until)[0]:
        frame, address = ready.recvfrom(65600)
        if address[2] == socket.PACKET_OUTGOING:
            continue
        way = sockets.index(ready)
        copies, delay = 1, options.delay_ms / 1000
        if options.source in (None, options.interfaces[way]):
            if happens(options.lose):
                continue
            if happens(options.duplicate):
                copies = 2
            if happens(options.reorder):
                delay += 0.02
            if len(frame) > HEADERS + 8 and frame[23] == UDP and happens(options.corrupt):
                frame = frame[:-1] + bytes([frame[-1] ^ 0x55])
        for _ in range(copies):
            count += 1
            heapq.heappush(waiting, (time.monotonic() + delay, count, 1 - way, frame))
    while waiting and waiting[0][0] <= time.monotonic():
        _, _, out, frame = heapq.heappop(waiting)
        send(out, frame)
