// A client made with the official SDK for TypeScript: says as JSON how wieldy answers it.
// node client.mjs RELEASE URL, or node client.mjs RELEASE COMMAND ARGUMENT…
const [release, ...where] = process.argv.slice(2);
const is_next = release === '@modelcontextprotocol/client';
const load = (path) => import(is_next ? release : `${release}/${path}`);
const { Client } = await load('client/index.js');
const { StreamableHTTPClientTransport } = await load('client/streamableHttp.js');
const { StdioClientTransport } = await import(is_next ? `${release}/stdio` : `${release}/client/stdio.js`);

const client = new Client(
  { name: 'typescript', version: '1' },
  { capabilities: { elicitation: {} }, versionNegotiation: { mode: 'auto' } },
);
const questions = [];
const answer = ({ params }) => {
  questions.push(params.message.split('\n')[0]);
  return questions.length === 1 ? { action: 'accept', content: {} } : { action: 'decline' };
};
const elicit = is_next ? 'elicitation/create' : (await load('types.js')).ElicitRequestSchema;
client.setRequestHandler(elicit, answer);

const [command, ...args] = where;
const transport = command.startsWith('http://')
  ? new StreamableHTTPClientTransport(new URL(command))
  : new StdioClientTransport({ command, args, env: process.env });
// The first generation tells nobody but its transport which revision it speaks.
let revision;
const set = transport.setProtocolVersion?.bind(transport);
transport.setProtocolVersion = (version) => {
  revision = version;
  set?.(version);
};
await client.connect(transport);

const whole = (name, args, options) => {
  const params = { name, arguments: args };
  return is_next ? client.callTool(params, options) : client.callTool(params, undefined, options);
};
const call = async (name, args, options) => {
  const { isError, content } = await whole(name, args, options);
  return { isError, content };
};
revision = client.getNegotiatedProtocolVersion?.() ?? revision;
const told = { server: client.getServerVersion().name, revision };
const { tools } = await client.listTools();
told.tools = tools.map((tool) => tool.name).filter((name) => ['Bash', 'Read', 'ask'].includes(name));
told.read = await call('Read', { path: 'note.txt' });
told.bash = await call('Bash', { command: 'echo hi' });
told.missing = await call('Read', { path: 'missing.txt' });
told.unknown = await call('nonsense', {}).catch((error) => error.code);
const progress = [];
const onprogress = ({ message }) => progress.push(message);
await call('Bash', { command: 'for i in 1 2 3 4 5 6; do echo $i; sleep 0.2; done' }, { onprogress });
told.progress = { text: progress.join(''), inSteps: progress.length > 1 };
const stop = new AbortController();
const stopped = { onprogress: () => stop.abort('enough'), signal: stop.signal };
told.cancelled = await call('Bash', { command: 'while true; do echo on; sleep 0.1; done' }, stopped).then(() => false, () => true);
told.confirmed = await call('ask', {});
told.declined = await call('ask', {});
told.questions = questions;
const { _meta } = await whole('Bash', { command: 'seq 100000' });
const uri = _meta['wieldy/artifact'];
const { contents } = await client.readResource({ uri: `${uri}?offset=0&length=20` });
told.artifact = contents.map((part) => part.text);
await client.close();
console.log(JSON.stringify(told));
