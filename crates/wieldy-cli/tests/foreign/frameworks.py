"""Agents made with the frameworks of others, which use the tools of `wieldy mcp`.

python frameworks.py FRAMEWORK WIELDY URL SCRIPT SEEN: a model at URL decides, see `model.py`; FastMCP has no agents, so
the calls of the script are made one by one, and the text that FastMCP's users get is written to SEEN.
"""

import asyncio
import json
import os
import sys

framework, wieldy, url, script, seen = sys.argv[1:]
program = {"command": wieldy, "args": ["mcp"], "env": dict(os.environ)}


async def pydantic_ai():
    from fastmcp.client.transports import StdioTransport
    from pydantic_ai import Agent
    from pydantic_ai.mcp import MCPToolset
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel("scripted", provider=OpenAIProvider(base_url=url, api_key="none"))
    agent = Agent(model, toolsets=[MCPToolset(StdioTransport(**program))], retries=20)
    async with agent:
        await agent.run("go")


def langchain_model():
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(model="scripted", base_url=url, api_key="none")


async def langchain():
    from langchain.agents import create_agent
    from langchain_mcp_adapters.client import MultiServerMCPClient

    client = MultiServerMCPClient({"wieldy": {"transport": "stdio", **program}})
    agent = create_agent(langchain_model(), await client.get_tools())
    await agent.ainvoke({"messages": [("user", "go")]}, {"recursion_limit": 100})


async def openai_agents():
    from agents import Agent, OpenAIResponsesModel, Runner, set_tracing_disabled
    from agents.mcp import MCPServerStdio
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    model = OpenAIResponsesModel("scripted", openai_client=AsyncOpenAI(base_url=url, api_key="none"))
    async with MCPServerStdio(program, client_session_timeout_seconds=60) as server:
        await Runner.run(Agent(name="agent", mcp_servers=[server], model=model), "go", max_turns=40)


async def mcp_use():
    os.environ["MCP_USE_ANONYMIZED_TELEMETRY"] = "false"
    from mcp_use import MCPAgent, MCPClient

    client = MCPClient.from_dict({"mcpServers": {"wieldy": program}})
    await MCPAgent(llm=langchain_model(), client=client, max_steps=60).run("go")
    await client.close_all_sessions()


async def fastmcp():
    from fastmcp import Client
    from fastmcp.client.transports import StdioTransport
    from fastmcp.exceptions import ToolError

    reached = {}
    async with Client(StdioTransport(**program)) as client:
        for call in json.load(open(script)):
            try:
                result = await client.call_tool(call["tool"], call["arguments"])
                blocks = [block.model_dump(mode="json") for block in result.content]
                reached[call["id"]] = json.dumps(result.structured_content) if result.structured_content else blocks
            except ToolError as error:
                reached[call["id"]] = str(error)
    with open(seen, "w") as file:
        json.dump(reached, file)


asyncio.run(globals()[framework]())
