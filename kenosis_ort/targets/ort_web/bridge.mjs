// ONNX Runtime Web (WASM) behind a pipe: one line of JSON in, one out. Arguments: the folder that onnxruntime-web is
// found from, and the number of threads (0: the runtime's own choice).
//
// The build has no file system, so the graph that it optimized is taken where it would write it: at the system call.
import fs from 'node:fs';
import { createRequire, syncBuiltinESMExports } from 'node:module';
import path from 'node:path';
import { performance } from 'node:perf_hooks';
import readline from 'node:readline';

const [folder, threads] = process.argv.slice(2);
const printed = []; // what the runtime prints: profiles are printed, line by line
const written = []; // what it writes into files
const system = fs.writeSync;
fs.writeSync = (fd, text, ...rest) => (fd === 1 ? printed.push(String(text)) : system.call(fs, fd, text, ...rest));
syncBuiltinESMExports();
console.log = (...parts) => printed.push(`${parts.join(' ')}\n`);

const PRINTS_LINES = /\b0===?\s*\w+\s*\|\|\s*(10===?\s*\w+|\w+===?\s*10)|\w+===?\s*0\s*\|\|\s*\w+===?\s*10\b/;
let catches = false;
const instantiate = WebAssembly.instantiate;
WebAssembly.instantiate = function (source, imports) {
  const all = Object.values(imports).flatMap((part) => Object.entries(part).map(([name, value]) => [part, name, value]));
  const memory = all.map(([, , value]) => value).find((value) => value instanceof WebAssembly.Memory);
  for (const [part, name, value] of all) {
    if (memory === undefined || typeof value !== 'function' || value.length !== 4 || !PRINTS_LINES.test(value)) continue;
    catches = true; // fd_write(fd, pieces, count, written)
    part[name] = (fd, pieces, count, out) => {
      if (fd === 1 || fd === 2) return value(fd, pieces, count, out);
      const words = new Uint32Array(memory.buffer);
      let total = 0;
      for (let i = 0; i < count; i++) {
        const at = (pieces >>> 2) + 2 * i;
        written.push(Buffer.from(new Uint8Array(memory.buffer, words[at], words[at + 1]))); // copies: WASM memory is reused
        total += words[at + 1];
      }
      words[out >>> 2] = total;
      return 0;
    };
  }
  return instantiate.call(this, source, imports);
};

const require = createRequire(path.join(path.resolve(folder), 'package.json'));
const ort = require('onnxruntime-web');
if (Number(threads)) ort.env.wasm.numThreads = Number(threads);
ort.env.logLevel = 'error';
const TYPES = {
  float32: Float32Array, float64: Float64Array, uint8: Uint8Array, int8: Int8Array, uint16: Uint16Array,
  int16: Int16Array, uint32: Uint32Array, int32: Int32Array, uint64: BigUint64Array, int64: BigInt64Array, bool: Uint8Array,
};
const sessions = new Map();

function create(file, more = {}) {
  const options = { executionProviders: ['wasm'], graphOptimizationLevel: 'all', logSeverityLevel: 4 };
  return ort.InferenceSession.create(fs.readFileSync(file), { ...options, ...more });
}

function tensors(inputs, file) {
  const bytes = fs.readFileSync(file);
  return Object.fromEntries(inputs.map(({ name, type, dims, begin, end }) => {
    const whole = bytes.buffer.slice(bytes.byteOffset + begin, bytes.byteOffset + end);
    return [name, new ort.Tensor(type, new TYPES[type](whole), dims)];
  }));
}

function spent() { // with one thread the time of the process, so that other programs do not count
  if (Number(threads) !== 1) return performance.now() / 1e3;
  const { user, system: kernel } = process.cpuUsage();
  return (user + kernel) / 1e6;
}

const commands = {
  version: () => ({ version: ort.env.versions.web, node: process.versions.node }),
  async open({ id, file }) {
    sessions.set(id, { session: await create(file), feed: undefined });
    return {};
  },
  feed({ id, inputs, file }) {
    sessions.get(id).feed = tensors(inputs, file);
    return {};
  },
  async run({ id, file }) {
    const { session, feed } = sessions.get(id);
    const begin = spent();
    const result = await session.run(feed);
    const seconds = spent() - begin;
    const outputs = [], parts = [];
    let at = 0;
    for (const name of file === undefined ? [] : session.outputNames) {
      const { type, dims, data } = result[name];
      if (!(type in TYPES)) throw new Error(`output '${name}' has type ${type}`);
      parts.push(Buffer.from(data.buffer, data.byteOffset, data.byteLength));
      outputs.push({ type, dims, begin: at, end: at + data.byteLength });
      at += data.byteLength;
    }
    if (file !== undefined) fs.writeFileSync(file, Buffer.concat(parts));
    return { seconds, outputs };
  },
  async optimized({ file, to }) {
    let refused;
    written.length = 0;
    const session = await create(file, { optimizedModelFilePath: 'optimized.onnx' }).catch((error) => { refused = error; });
    await session?.release();
    if (!catches) throw new Error('this build does not tell what it made of a model');
    if (!written.length) throw refused ?? new Error('it wrote no optimized model'); // closing its file is refused: never mind
    fs.writeFileSync(to, Buffer.concat(written));
    written.length = 0;
    return {};
  },
  async profile({ file, inputs, data, runs, to }) {
    const session = await create(file, { enableProfiling: true });
    const feed = tensors(inputs, data);
    for (let i = 0; i < runs; i++) await session.run(feed);
    printed.length = 0;
    session.endProfiling();
    const text = printed.join('');
    fs.writeFileSync(to, text.slice(text.indexOf('['), text.lastIndexOf(']') + 1));
    await session.release();
    return {};
  },
};

for await (const line of readline.createInterface({ input: process.stdin })) {
  let reply;
  try {
    const said = JSON.parse(line);
    for (const id of said.gone) {
      await sessions.get(id)?.session.release();
      sessions.delete(id);
    }
    reply = { ok: true, ...(await commands[said.do](said)) };
  } catch (error) {
    reply = { ok: false, error: String(error?.message ?? error) };
  }
  printed.length = 0;
  process.stdout.write(`${JSON.stringify(reply)}\n`);
}
