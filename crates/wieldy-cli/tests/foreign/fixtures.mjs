// The tools that the conformance suite wants to call, as an MCP server for wieldy to stand in front of.
import { Server } from '@modelcontextprotocol/sdk/server/index.js';
import { StdioServerTransport } from '@modelcontextprotocol/sdk/server/stdio.js';
import { CallToolRequestSchema, ListToolsRequestSchema, McpError } from '@modelcontextprotocol/sdk/types.js';

const PNG = 'iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8DwHwAFBQIAX8jx0gAAAABJRU5ErkJggg==';
const WAV = 'UklGRiYAAABXQVZFZm10IBAAAAABAAEAQB8AAAB9AAACABAAZGF0YQIAAAA=';
const text = (text) => ({ type: 'text', text });
const image = { type: 'image', data: PNG, mimeType: 'image/png' };
const pause = (ms = 50) => new Promise((done) => setTimeout(done, ms));

const tools = {
  test_simple_text: () => [text('This is a simple text response for testing.')],
  test_image_content: () => [image],
  test_audio_content: () => [{ type: 'audio', data: WAV, mimeType: 'audio/wav' }],
  test_embedded_resource: () => [
    {
      type: 'resource',
      resource: {
        uri: 'test://embedded-resource',
        mimeType: 'text/plain',
        text: 'This is an embedded resource content.',
      },
    },
  ],
  test_multiple_content_types: () => [
    text('Multiple content types test:'),
    image,
    {
      type: 'resource',
      resource: {
        uri: 'test://mixed-content-resource',
        mimeType: 'application/json',
        text: '{"test":"data","value":123}',
      },
    },
  ],
  test_error_handling: () => {
    throw new Error('This tool intentionally returns an error for testing');
  },
  test_tool_with_progress: async ({ _meta, sendNotification }) => {
    const progressToken = _meta?.progressToken;
    for (const progress of [0, 50, 100]) {
      if (progressToken !== undefined) {
        const params = { progressToken, progress, total: 100 };
        await sendNotification({ method: 'notifications/progress', params });
      }
      await pause();
    }
    return [text('done')];
  },
  // Nobody asked for what it says, so it must not arrive.
  test_logging_tool: async ({ sendNotification }) => {
    await sendNotification({ method: 'notifications/message', params: { level: 'info', data: 'unasked' } });
    return [text('done')];
  },
  test_trigger_tool_change: async () => {
    tools[`added_${Object.keys(tools).length}`] = () => [text('new')];
    await server.sendToolListChanged();
    return [text('done')];
  },
  test_argument_in_header: () => [text('called')],
  // These have to be confirmed, by wieldy.
  test_streaming_elicitation: () => [text('confirmed')],
  test_input_required_result_elicitation: () => [text('confirmed')],
  test_input_required_result_request_state: () => [text('confirmed')],
  test_input_required_result_tampered_state: () => [text('confirmed')],
  confirm_delete: () => [text('confirmed')],
  // These take long enough to become tasks, but for the first.
  greet: (_, { name }) => [text(`Hello, ${name}!`)],
  slow_compute: async (_, { seconds, label }) => {
    await pause(seconds * 1000);
    return [text(`computed "${label}"`)];
  },
  failing_job: async () => {
    await pause(1000);
    throw new Error('it failed');
  },
  protocol_error_job: async () => {
    await pause(1000);
    throw new McpError(-32603, 'it broke');
  },
  test_tool_with_task: async () => {
    await pause(1000);
    return [text('done')];
  },
};

// What a proxy may read in a header must be what is called.
const copied = { type: 'object', properties: { region: { type: 'string', 'x-mcp-header': 'Region' } } };
const schema = (name) => (name === 'test_argument_in_header' ? copied : { type: 'object' });

const server = new Server({ name: 'fixtures', version: '1' }, { capabilities: { tools: { listChanged: true }, logging: {} } });
server.setRequestHandler(ListToolsRequestSchema, () => ({
  tools: Object.keys(tools).map((name) => ({ name, description: name, inputSchema: schema(name) })),
}));
server.setRequestHandler(CallToolRequestSchema, async ({ params }, extra) => {
  try {
    return { content: await tools[params.name](extra, params.arguments ?? {}) };
  } catch (error) {
    if (error instanceof McpError) throw error;
    return { isError: true, content: [text(error.message)] };
  }
});
await server.connect(new StdioServerTransport());
