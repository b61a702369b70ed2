// What the conformance suite judges as a client: the command, which is given the address of the suite's server.
// Like a person who has got to know a new server, it asks for its tools and calls each of them, and logs in where that is wanted.
import { spawn, spawnSync } from 'node:child_process';
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';

const [wieldy, url] = process.argv.slice(2);
// The suite may say what it wants to be called with, and who we are.
const context = JSON.parse(process.env.MCP_CONFORMANCE_CONTEXT ?? '{}');
const folder = mkdtempSync(join(tmpdir(), 'judged-'));
const configure = (scopes) => {
  const config = ['[mcp.servers.suite]', `url = ${JSON.stringify(url)}`, 'timeout = "10s"', '[mcp.servers.suite.oauth]'];
  if (context.client_id) config.push(`client-id = "${context.client_id}"`);
  if (context.client_secret) config.push(`client-secret = "${context.client_secret}"`);
  if (scopes) config.push(`scopes = ${JSON.stringify(scopes.split(' '))}`);
  writeFileSync(join(folder, 'wieldy.toml'), config.join('\n'));
};
configure();

const run = (...args) => {
  const done = spawnSync(wieldy, [...args, '--config', 'wieldy.toml', '--state', 'state', '--json'], { cwd: folder, encoding: 'utf8' });
  console.log(args.join(' '), done.stdout, done.stderr);
  return done;
};

// Opens the page as a browser would, whose user agrees to everything.
const logIn = async () => {
  const login = spawn(wieldy, ['mcp', 'login', 'suite', '--config', 'wieldy.toml', '--state', 'state', '--json'], { cwd: folder });
  login.stderr.on('data', (data) => console.log(`${data}`));
  login.stdout.once('data', async (data) => {
    const { open } = JSON.parse(`${data}`);
    if (open) console.log(open, (await fetch(open)).status);
  });
  const patience = setTimeout(() => login.kill(), 20_000);
  await new Promise((done) => login.once('close', done));
  clearTimeout(patience);
};
const asPerson = async (...args) => {
  let done = run(...args);
  for (let logins = 0; logins < 2 && /wants a login|refuses access/.test(done.stdout); logins += 1) {
    // It may say what the login has to be for.
    const scopes = done.stdout.match(/"scope":"([^"]*)"/);
    if (scopes) configure(scopes[1]);
    await logIn();
    done = run(...args);
  }
  return done;
};

const usual = {
  add_numbers: () => ({ a: 5, b: 3 }),
  valid_tool: () => ({ region: 'north' }),
  json_schema_2020_12_tool: () => ({ email: 'ada@example.com' }),
  json_schema_echo: () => {
    const shown = run('tools', 'show', server.tools.json_schema_2020_12_tool);
    return { schema: JSON.parse(shown.stdout).input_schema };
  },
};
const [server] = JSON.parse((await asPerson('mcp', 'test')).stdout);
let failed = server.state.is !== 'ready';
for (const tool of Object.keys(server.tools)) {
  const args = context.toolCalls?.find((call) => call.name === tool)?.arguments ?? usual[tool]?.() ?? {};
  failed |= (await asPerson('call', server.tools[tool], '--args', JSON.stringify(args))).status !== 0;
}
rmSync(folder, { recursive: true });
process.exit(failed ? 1 : 0);
