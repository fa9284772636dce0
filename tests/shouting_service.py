"""A service for tests of its benchmark: it answers in capital letters, or wrongly if asked to."""

import argparse
import asyncio
import json
import os
import re
import signal

parser = argparse.ArgumentParser()
parser.add_argument("--host")
parser.add_argument("--port", type=int)
parser.add_argument(
    "--fault", choices=["none", "wrong", "busy", "late", "hasty", "status"], default="none"
)
arguments, _ = parser.parse_known_args()
idle: set[asyncio.StreamWriter] = set()
ending = asyncio.Event()
connections: set[asyncio.Task] = set()


async def answer(path: str, body: bytes) -> bytes:
    if path == "/translate":
        await asyncio.sleep(0.02)
        fields = json.loads(body)
        assert (fields["source"], fields["target"], fields["split"]) == ("en", "de", False)
        line = fields["q"]
        right = arguments.fault != "wrong" or "two" not in line
        return json.dumps({"translatedText": line.upper() if right else line}).encode()
    if path != "/metrics":
        return b"{}"
    busy = int(arguments.fault in ("busy", "late"))
    if arguments.fault == "late":  # the first answer is, and then nothing is busy any more
        arguments.fault = "none"
        await asyncio.sleep(0.6)
    rows = f'# HELP\ntransformer_rows_busy{{model="0"}} {busy}\n'
    return f"{rows}transformer_sentences_waiting 0\n".encode()


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    task = asyncio.current_task()
    assert task is not None
    connections.add(task)
    try:
        while not ending.is_set():
            idle.add(writer)
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"Content-Length: (\d+)", head)
            body = await reader.readexactly(int(length[1]) if length else 0)
            idle.remove(writer)
            found = await answer(head.split()[1].decode(), body)
            more = b"Connection: close\r\n" if ending.is_set() else b""
            writer.write(b"HTTP/1.1 200 OK\r\n%bcontent-length: %d\r\n\r\n" % (more, len(found)))
            writer.write(found)
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        idle.discard(writer)
        writer.close()
        connections.remove(task)


def end() -> None:
    if arguments.fault == "hasty":
        os._exit(0)
    ending.set()
    for writer in idle:
        writer.close()


async def main() -> int:
    server = await asyncio.start_server(serve, arguments.host, arguments.port)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, end)
    await ending.wait()
    server.close()
    if connections:
        await asyncio.wait(connections)
    return 3 if arguments.fault == "status" else 0


raise SystemExit(asyncio.run(main()))
