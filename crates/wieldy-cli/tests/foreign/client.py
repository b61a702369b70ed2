"""A client made with the official SDK for Python: says as JSON how wieldy answers it.

python client.py URL, or python client.py COMMAND ARGUMENT…
"""

import contextlib
import json
import os
import sys

import anyio

try:
    from mcp import Client, MCPError, StdioServerParameters  # 2.x
except ImportError:  # 1.x
    from mcp import ClientSession, McpError as MCPError, StdioServerParameters
    from mcp.client.stdio import stdio_client
    from mcp.client.streamable_http import streamablehttp_client

    Client = None
from mcp.types import ElicitResult

questions = []


async def answer(_context, params):
    questions.append(params.message.split("\n")[0])
    return ElicitResult(action="accept", content={}) if len(questions) == 1 else ElicitResult(action="decline")


@contextlib.asynccontextmanager
async def connected(where):
    is_http = where[0].startswith("http://")
    program = StdioServerParameters(command=where[0], args=where[1:], env=dict(os.environ))
    if Client:
        async with Client(where[0] if is_http else program, elicitation_callback=answer) as client:
            yield client, client.server_info.name, client.protocol_version
        return
    async with streamablehttp_client(where[0]) if is_http else stdio_client(program) as streams:
        async with ClientSession(streams[0], streams[1], elicitation_callback=answer) as client:
            told = await client.initialize()
            yield client, told.serverInfo.name, told.protocolVersion


async def main():
    async with connected(sys.argv[1:]) as (client, name, revision):

        async def whole(tool, arguments, progress=None):
            result = await client.call_tool(tool, arguments, progress_callback=progress)
            return result.model_dump(mode="json", by_alias=True, exclude_none=True)

        async def call(tool, arguments, progress=None):
            result = await whole(tool, arguments, progress)
            return {"isError": result["isError"], "content": result["content"]}

        told = {"server": name, "revision": revision}
        tools = [tool.name for tool in (await client.list_tools()).tools]
        told["tools"] = [name for name in tools if name in ("Bash", "Read", "ask")]
        told["read"] = await call("Read", {"path": "note.txt"})
        told["bash"] = await call("Bash", {"command": "echo hi"})
        told["missing"] = await call("Read", {"path": "missing.txt"})
        try:
            told["unknown"] = await call("nonsense", {})
        except MCPError as error:
            told["unknown"] = error.error.code
        progress = []

        async def progressed(_progress, _total, message):
            progress.append(message)

        await call("Bash", {"command": "for i in 1 2 3 4 5 6; do echo $i; sleep 0.2; done"}, progressed)
        told["progress"] = {"text": "".join(progress), "inSteps": len(progress) > 1}
        with anyio.CancelScope() as scope:

            async def stop(*_):
                scope.cancel()

            # Quiet after that: the SDK of 2025 does not say that it stops waiting, and breaks down if it is told of progress
            # while it says goodbye.
            await call("Bash", {"command": "echo on; sleep 0.2; echo on; sleep 600"}, stop)
        told["cancelled"] = scope.cancelled_caught
        told["confirmed"] = await call("ask", {})
        told["declined"] = await call("ask", {})
        told["questions"] = questions
        uri = (await whole("Bash", {"command": "seq 100000"}))["_meta"]["wieldy/artifact"]
        contents = (await client.read_resource(f"{uri}?offset=0&length=20")).contents
        told["artifact"] = [part.text for part in contents]
    print(json.dumps(told))


anyio.run(main)
