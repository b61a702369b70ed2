// What the conformance suite judges as a client: the command, which is given the address of the suite's server.
// Like a person who has got to know a new server, it asks for its tools and calls each of them.
import { spawnSync } from 'node:child_process';
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';

const [wieldy, url] = process.argv.slice(2);
const folder = mkdtempSync(join(tmpdir(), 'judged-'));
writeFileSync(join(folder, 'wieldy.toml'), `[mcp.servers.suite]\nurl = ${JSON.stringify(url)}\ntimeout = "10s"\n`);
const run = (...args) => {
  const done = spawnSync(wieldy, [...args, '--state', 'state', '--json'], { cwd: folder, encoding: 'utf8' });
  console.log(args.join(' '), done.stdout, done.stderr);
  return done;
};

// The suite may say what it wants to be called with.
const told = JSON.parse(process.env.MCP_CONFORMANCE_CONTEXT ?? '{}').toolCalls ?? [];
const usual = {
  add_numbers: () => ({ a: 5, b: 3 }),
  valid_tool: () => ({ region: 'north' }),
  json_schema_2020_12_tool: () => ({ email: 'ada@example.com' }),
  json_schema_echo: () => {
    const shown = run('tools', 'show', server.tools.json_schema_2020_12_tool);
    return { schema: JSON.parse(shown.stdout).input_schema };
  },
};
const [server] = JSON.parse(run('mcp', 'test').stdout);
let failed = server.state.is !== 'ready';
for (const tool of Object.keys(server.tools)) {
  const call = told.find((call) => call.name === tool)?.arguments ?? usual[tool]?.() ?? {};
  failed |= run('call', server.tools[tool], '--args', JSON.stringify(call)).status !== 0;
}
rmSync(folder, { recursive: true });
process.exit(failed ? 1 : 0);
