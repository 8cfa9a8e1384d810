// The official JavaScript clients against a running server: openai, and ai with @ai-sdk/openai-compatible.
//
//     node clients.mjs http://127.0.0.1:8080
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, streamText, tool } from "ai";
import assert from "node:assert/strict";
import OpenAI from "openai";

const address = process.argv[2];
const question = [{ role: "user", content: "What is the capital of Portugal?" }];
const answer = "The capital of Portugal is Lisbon.";
const unit = { type: "object", properties: { unit: { type: "string", enum: ["C", "F"] } }, required: ["unit"], additionalProperties: false };

const client = new OpenAI({ baseURL: `${address}/v1`, apiKey: "none", maxRetries: 0 });
let text = "";
for await (const chunk of await client.chat.completions.create({ model: "builtin", messages: question, temperature: 0, stream: true })) {
  text += chunk.choices[0]?.delta.content ?? "";
}
assert.equal(text, answer);
const tools = [{ type: "function", function: { name: "set_unit", parameters: unit } }];
const asked = { model: "builtin", messages: question, tools, tool_choice: "required", temperature: 1.5, max_tokens: 200 };
const called = await client.chat.completions.stream(asked).finalChatCompletion();
assert.match(JSON.parse(called.choices[0].message.tool_calls[0].function.arguments).unit, /^[CF]$/);
await assert.rejects(client.chat.completions.create({ model: "other", messages: question }), OpenAI.NotFoundError);
assert.equal((await client.responses.create({ model: "builtin", input: question[0].content, temperature: 0 })).output_text, answer);
console.log("openai: as expected");

const model = createOpenAICompatible({ name: "qhx", baseURL: `${address}/v1`, includeUsage: true })("builtin");
const whole = await generateText({ model, messages: question, temperature: 0 });
assert.equal(whole.text, answer);
assert(whole.usage.outputTokens > 0);
const stream = streamText({ model, messages: question, temperature: 0 });
let streamed = "";
for await (const part of stream.textStream) streamed += part;
assert.equal(streamed, answer);
const set_unit = tool({ description: "Sets the unit", inputSchema: jsonSchema(unit) });
const use = streamText({ model, messages: question, tools: { set_unit }, toolChoice: "required", temperature: 1.5, maxOutputTokens: 200 });
const calls = await use.toolCalls;
assert(calls.length > 0 && calls.every((call) => call.toolName === "set_unit" && /^[CF]$/.test(call.input.unit)), JSON.stringify(calls));
console.log("ai, @ai-sdk/openai-compatible: as expected");
