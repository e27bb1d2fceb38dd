// Prints requests that the libraries of GitHub and Shopify sign or verify, whole and damaged, and what the libraries say
// of them; and requests of Standard Webhooks that Node signs by Ed25519. The output is signed.jsonl beside this file:
//
//   npm install --no-save --prefix /tmp/webhooks @octokit/webhooks-methods@6.0.0 @shopify/shopify-api@13.1.0
//   cp sign.mjs /tmp/webhooks && node /tmp/webhooks/sign.mjs > signed.jsonl

import {createHmac, sign as signBytes, createPrivateKey, createPublicKey} from 'node:crypto';
import {sign, verify} from '@octokit/webhooks-methods';
import '@shopify/shopify-api/adapters/node';
import {shopifyApi, ApiVersion, LogSeverity} from '@shopify/shopify-api';

const NOW = 1_733_027_000;

// A small generator (mulberry32), so that the output is the same each time.
let state = 53;
function random() {
  state = (state + 0x6d2b79f5) | 0;
  let t = Math.imul(state ^ (state >>> 15), 1 | state);
  t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
  return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
}
const below = (most) => Math.floor(random() * most);
const pick = (all) => all[below(all.length)];
const token = () => Array.from({length: 4 + below(16)}, () => pick([...'abcdefXYZ0123456789'])).join('');
const text = () => Array.from({length: 1 + below(8)}, () => pick([...'abc01 é漢😀"\\&=+'])).join('');
const body = () => JSON.stringify({action: token(), data: {[text()]: pick([text(), below(1e9), null])}}, null, pick([0, 0, 2]));

function damaged(value) {
  const place = below(value.length);
  return value.slice(0, place) + String.fromCharCode(0x20 + below(0x5f)) + value.slice(place + 1);
}

function print(preset, damage, secrets, request, accepted) {
  const {headers, body, id} = request;
  const line = {preset, damage, secrets, headers, body: Buffer.from(body).toString('base64'), url: '', now_unix_s: NOW, id, accepted};
  process.stdout.write(JSON.stringify(line) + '\n');
}

const github = {
  preset: 'github',
  signature: 'X-Hub-Signature-256',
  async make(secret) {
    const content = body();
    const id = token();
    return {body: content, id: [id], headers: {'X-Hub-Signature-256': await sign(secret, content), 'X-GitHub-Delivery': id}};
  },
  async accepts(request, secret) {
    try {
      return await verify(secret, request.body, request.headers['X-Hub-Signature-256']);
    } catch {
      return false;
    }
  },
};

const shopify = {
  preset: 'shopify',
  signature: 'hmac-sha256',
  async make(secret) {
    const content = body();
    const prefix = pick(['X-Shopify-', 'X-Shopify-', 'shopify-']);
    const id = [`${token()}.myshopify.com`, pick(['orders/create', 'products/update']), token()];
    const headers = {
      [`${prefix}Hmac-Sha256`]: createHmac('sha256', secret).update(content).digest('base64'),
      [`${prefix}Shop-Domain`]: id[0],
      [`${prefix}Topic`]: id[1],
      [`${prefix}Event-Id`]: id[2],
      [`${prefix}API-Version`]: '2026-10',
      [`${prefix}Webhook-Id`]: token(),
    };
    return {body: content, id, headers};
  },
  async accepts(request, secret) {
    const api = shopifyApi({
      apiKey: 'key',
      apiSecretKey: secret,
      hostName: 'example.com',
      apiVersion: Object.values(ApiVersion)[0],
      isEmbeddedApp: false,
      logger: {level: LogSeverity.Error, log: () => {}},
    });
    const rawRequest = {method: 'POST', url: '/', headers: request.headers, rawHeaders: Object.entries(request.headers).flat()};
    try {
      const answer = await api.webhooks.validate({rawBody: request.body, rawRequest, rawResponse: {}});
      return answer.valid;
    } catch {
      return false;
    }
  },
};

async function* damages(provider, secret, request) {
  const changed = (parts) => ({...request, ...parts});
  const signature = Object.keys(request.headers).find((name) => name.toLowerCase().endsWith(provider.signature.toLowerCase()));
  const with_ = (value) => changed({headers: {...request.headers, [signature]: value}});
  const right = request.headers[signature];
  yield ['none', request];
  yield ['a byte of the body', changed({body: damaged(request.body)})];
  yield ['a byte less', changed({body: request.body.slice(0, -1)})];
  yield ['no body', changed({body: ''})];
  yield ['parsed and written again', changed({body: JSON.stringify(JSON.parse(request.body), null, 1)})];
  yield ['a byte of the signature', with_(damaged(right))];
  yield ['another case', with_(right.toUpperCase())];
  yield ['a part of the signature', with_(right.slice(0, below(right.length)))];
  const other = await provider.make(secret);
  yield ['the body of another', changed({body: other.body})];
  yield ['another secret', await provider.make(token())];
  for (const name of Object.keys(request.headers).filter((name) => !/event-id|delivery/i.test(name))) {
    const less = {...request.headers};
    delete less[name];
    yield [`no ${name}`, changed({headers: less})];
  }
}

for (const provider of [github, shopify]) {
  for (let count = 0; count < 12; count++) {
    const secrets = [token(), token()];
    const signer = pick(secrets);
    for await (const [damage, request] of damages(provider, signer, await provider.make(signer))) {
      const accepted = (await Promise.all(secrets.map((secret) => provider.accepts(request, secret)))).some(Boolean);
      print(provider.preset, damage, secrets, request, accepted);
    }
  }
}

// No library of the Standard Webhooks project verifies `v1a`; Node's own Ed25519 signs as the specification says.
for (let count = 0; count < 12; count++) {
  const seed = Buffer.from(Array.from({length: 32}, () => below(256)));
  const key = createPrivateKey({key: Buffer.concat([Buffer.from('302e020100300506032b657004220420', 'hex'), seed]), format: 'der', type: 'pkcs8'});
  const raw = createPublicKey(key).export({format: 'der', type: 'spki'}).subarray(-32);
  const content = body();
  const id = `msg_${token()}`;
  const signature = signBytes(null, Buffer.from(`${id}.${NOW}.${content}`), key).toString('base64');
  const headers = {'webhook-id': id, 'webhook-timestamp': `${NOW}`, 'webhook-signature': `v1a,${signature}`};
  const request = {body: content, id: [id], headers};
  const secrets = [`whpk_${raw.toString('base64')}`];
  print('standard', 'none', secrets, request, true);
  print('standard', 'a byte less', secrets, {...request, body: content.slice(0, -1)}, false);
  print('standard', 'another id', secrets, {...request, headers: {...headers, 'webhook-id': 'msg_'}}, false);
  print('standard', 'another version', secrets, {...request, headers: {...headers, 'webhook-signature': `v1,${signature}`}}, false);
}
