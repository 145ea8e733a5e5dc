// What users of `openai` for Node do.
import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { test } from "node:test";

// Packages are in the environment of the node that runs this, not beside this file.
const require = createRequire(process.env.NODE_PACKAGES);
const OpenAI = require("openai").default;
const { zodFunction, zodResponseFormat } = require("openai/helpers/zod");
const { z } = require("zod");

const apiKey = process.env.OPENAI_API_KEY;
const client = (name, options = {}) =>
  new OpenAI({ baseURL: `${process.env[name]}/v1`, apiKey, maxRetries: 0, ...options });
const real = client("NANOVLLM_URL");
const obedient = client("NANOVLLM_OBEDIENT_URL");
const busy = client("NANOVLLM_BUSY_URL");

const model = "tiny";
const hello = [{ role: "user", content: "Hello" }];
const say = (text) => [{ role: "user", content: `Say: ${text}` }];
const call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>';
const Place = z.object({ city: z.enum(["Rome", "Oslo"]) });
const weather = zodFunction({ name: "weather", parameters: Place });

test("chats and their streams", async () => {
  const whole = await obedient.chat.completions.create({ model, messages: say("Grüße! 🙂") });
  assert.equal(whole.choices[0].message.content, "Grüße! 🙂");
  const stream = await obedient.chat.completions.create({
    model, messages: say("Grüße! 🙂"), stream: true, stream_options: { include_usage: true },
  });
  let text = "", usage;
  for await (const chunk of stream) {
    text += chunk.choices[0]?.delta?.content ?? "";
    usage = chunk.usage ?? usage;
  }
  assert.equal(text, "Grüße! 🙂");
  assert.deepEqual(usage, whole.usage);
});

test("tools that run by themselves", async () => {
  const asked = [];
  const runner = obedient.chat.completions.runTools({
    model,
    messages: say(call),
    tools: [{
      type: "function",
      function: {
        name: "weather",
        parse: JSON.parse,
        parameters: { type: "object", properties: { city: { type: "string" } } },
        function: ({ city }) => { asked.push(city); return "Say: It is sunny."; },
      },
    }],
  });
  assert.equal(await runner.finalContent(), "It is sunny.");
  assert.deepEqual(asked, ["Rome"]);
});

test("calls in streams", async () => {
  const stream = obedient.chat.completions.stream({ model, messages: say(call), tools: [weather] });
  const message = await stream.finalMessage();
  assert.deepEqual(JSON.parse(message.tool_calls[0].function.arguments), { city: "Rome" });
});

test("answers and calls of a type", async () => {
  const options = { model, messages: hello, max_tokens: 200, reasoning_effort: "none" };
  const answer = await real.chat.completions.parse({
    ...options, response_format: zodResponseFormat(Place, "place"),
  });
  Place.parse(answer.choices[0].message.parsed);
  const called = await real.chat.completions.parse({
    ...options, tools: [weather], tool_choice: "required", parallel_tool_calls: false,
  });
  Place.parse(called.choices[0].message.tool_calls[0].function.parsed_arguments);
});

test("responses", async () => {
  const tool = { type: "function", strict: true, ...weather.function, function: undefined };
  const input = `Say: <think>Hm.</think>See.${call}`;
  const answer = await obedient.responses.create({ model, input, tools: [tool] });
  assert.equal(answer.output_text, "See.");
  assert.deepEqual(answer.output.map((item) => item.type), ["reasoning", "message", "function_call"]);
  const stream = obedient.responses.stream({ model, input, tools: [tool] });
  let text = "";
  stream.on("response.output_text.delta", (event) => { text += event.delta; });
  const final = await stream.finalResponse();
  assert.equal(text, "See.");
  assert.equal(final.output.at(-1).name, "weather");
});

test("embeddings and models", async () => {
  const answer = await real.embeddings.create({ model, input: ["one", "two"] });
  const length = Math.hypot(...answer.data[0].embedding);
  assert.ok(Math.abs(length - 1) < 1e-4);
  const names = [];
  for await (const each of real.models.list()) names.push(each.id);
  assert.deepEqual(names, [model]);
});

test("errors of their kinds", async () => {
  const ask = (by, options) => by.chat.completions.create({ model, messages: hello, ...options });
  await assert.rejects(ask(real, { temperature: 3 }), OpenAI.BadRequestError);
  await assert.rejects(ask(real, { model: "other" }), OpenAI.NotFoundError);
  const long = [{ role: "user", content: "x".repeat(5000) }];
  await assert.rejects(ask(real, { messages: long }), { code: "context_length_exceeded" });
  await assert.rejects(ask(busy, {}), OpenAI.RateLimitError);
  const stranger = client("NANOVLLM_URL", { apiKey: "wrong" });
  await assert.rejects(ask(stranger, {}), OpenAI.AuthenticationError);
});

test("answers that are given up", async () => {
  const endless = { model, messages: hello, max_tokens: 3000, ignore_eos: true };
  const controller = new AbortController();
  setTimeout(() => controller.abort(), 100);
  const { signal } = controller;
  await assert.rejects(
    real.chat.completions.create(endless, { signal }), OpenAI.APIUserAbortError,
  );
  const stream = await real.chat.completions.create({ ...endless, stream: true });
  for await (const _ of stream) { stream.controller.abort(); break; }
  const headers = { "x-api-key": apiKey };
  for (let i = 0; ; i++) {
    const load = await (await fetch(`${process.env.NANOVLLM_URL}/load`, { headers })).json();
    if (load.server_load === 0) break;
    assert.ok(i < 100, "the server still works for clients that are gone");
    await new Promise((resolve) => setTimeout(resolve, 100));
  }
});
