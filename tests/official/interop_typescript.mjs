// What the TypeScript SDK's client does with the reference server; interop.py copies it beside the installed packages.
//
//     node interop_typescript.mjs {URL | COMMAND ARGUMENT...}
//
// Prints one JSON array for each feature: its name, works / not offered / fails, and what was seen.

import assert from 'node:assert/strict';
import { Client, StreamableHTTPClientTransport } from '@modelcontextprotocol/client';
import { StdioClientTransport } from '@modelcontextprotocol/client/stdio';

const CONFIG = 'file:///project/config.json';

class NotOffered extends Error {}

const client = new Client(
    { name: 'interop', version: '1.0.0' },
    // Without versionNegotiation the client stays with the 2025 handshake.
    { versionNegotiation: { mode: { pin: '2026-07-28' } }, capabilities: { elicitation: { form: {}, url: {} } } },
);

client.setRequestHandler('elicitation/create', async ({ params }) => {
    if (params.mode === 'url') {
        await text('finish_billing', { visit: params.url.split('/').pop() }); // the tool that plays the page
        return { action: 'accept' };
    }
    const answers = Object.keys(params.requestedSchema.properties).map(name => [name, 'octocat']);
    return { action: 'accept', content: Object.fromEntries(answers) };
});

async function call(name, args = {}, options = {}) {
    const result = await client.callTool({ name, arguments: args }, options);
    assert(!result.isError, JSON.stringify(result.content));
    return result;
}

async function text(name, args) {
    return (await call(name, args)).content[0].text;
}

function methodsAbout(word) {
    const names = [];
    for (let type = Client.prototype; type !== Object.prototype; type = Object.getPrototypeOf(type))
        names.push(...Object.getOwnPropertyNames(type).filter(name => !name.startsWith('_')));
    return names.filter(name => name.toLowerCase().includes(word));
}

const features = {
    async 'discover'() {
        assert.equal(client.getNegotiatedProtocolVersion(), '2026-07-28');
        return JSON.stringify(client.getServerVersion());
    },
    async 'list tools'() {
        const { tools } = await client.listTools();
        assert(tools.some(tool => tool.name === 'build_report'));
        return `${tools.length} tools`;
    },
    async 'call'() {
        return text('get_weather', { location: 'Paris' });
    },
    async 'structured output'() {
        const { structuredContent } = await call('get_weather_data', { location: 'Paris' });
        assert(structuredContent);
        return JSON.stringify(structuredContent);
    },
    async 'mirrored argument'() {
        return text('execute_sql', { region: 'us-west1', query: 'SELECT 1' });
    },
    async 'progress'() {
        const seen = [], late = [];
        client.onerror = error => late.push(error.message);
        await call('build_report', { month: '2026-06' }, { onprogress: ({ progress }) => seen.push(progress) });
        // Progress that the client reads in one piece with the answer finds its handler gone: it says so by onerror.
        const lost = late.filter(message => message.includes('progress notification for an unknown token')).length;
        assert.deepEqual(seen, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10].slice(0, 10 - lost));
        return lost ? `${seen}, and ${lost} came to the client too late for its handler` : String(seen);
    },
    async 'cancel'() {
        const caller = new AbortController();
        const onprogress = ({ progress }) => progress >= 2 && caller.abort('enough');
        await assert.rejects(call('build_report', { month: '2026-07' }, { onprogress, signal: caller.signal }));
        return 'cancelled by the client'; // interop.py looks for it in the server's log
    },
    async 'resources'() {
        const { resources } = await client.listResources();
        const { resourceTemplates } = await client.listResourceTemplates();
        const { contents } = await client.readResource({ uri: CONFIG });
        assert(resources.some(resource => resource.uri === CONFIG) && resourceTemplates.length && contents[0].text);
        return `${resources.length} and ${resourceTemplates.map(template => template.uriTemplate)}`;
    },
    async 'prompts'() {
        const { prompts } = await client.listPrompts();
        assert(prompts.some(prompt => prompt.name === 'code_review'));
        const args = { code: 'print(1)', language: 'python' };
        const { messages } = await client.getPrompt({ name: 'code_review', arguments: args });
        assert.match(messages[0].content.text, /print\(1\)/);
        return messages[0].content.text;
    },
    async 'completion'() {
        const ref = { type: 'ref/prompt', name: 'code_review' };
        const { completion } = await client.complete({ ref, argument: { name: 'language', value: 'py' } });
        assert(completion.values.includes('python'));
        return String(completion.values);
    },
    async 'form elicitation'() {
        const words = await text('create_repo', { repo: 'demo' });
        assert.match(words, /octocat/);
        return words;
    },
    async 'URL elicitation'() {
        const words = await text('connect_billing');
        assert.match(words, /is connected/);
        return words;
    },
    async 'subscription'() {
        const tools = new Promise(seen => client.setNotificationHandler('notifications/tools/list_changed', seen));
        const config = new Promise(seen => client.setNotificationHandler('notifications/resources/updated', seen));
        const subscription = await client.listen({ toolsListChanged: true, resourceSubscriptions: [CONFIG] });
        await call('toggle_beta_tool');
        await tools;
        await call('touch_config');
        assert.equal((await config).params.uri, CONFIG);
        await subscription.close();
        await call('toggle_beta_tool'); // as it was
        return JSON.stringify(subscription.honoredFilter);
    },
    async 'tasks'() {
        assert.deepEqual(methodsAbout('task'), []);
        throw new NotOffered('Client has no method for tasks');
    },
};

const [target, ...rest] = process.argv.slice(2);
const http = target.startsWith('http');
await client.connect(http ? new StreamableHTTPClientTransport(new URL(target))
    : new StdioClientTransport({ command: target, args: rest, stderr: 'inherit' }));
for (const [feature, check] of Object.entries(features)) {
    let late;
    const timeout = new Promise((_, reject) => { late = setTimeout(reject, 30_000, new Error('no answer in 30 s')); });
    let report;
    try {
        report = [feature, 'works', (await Promise.race([check(), timeout])).slice(0, 100)];
    } catch (error) {
        report = [feature, error instanceof NotOffered ? 'not offered' : 'fails', String(error.message)];
    }
    clearTimeout(late);
    console.log(JSON.stringify(report));
}
await client.close();
