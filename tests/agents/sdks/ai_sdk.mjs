// Vercel's AI SDK calls one custom tool: `ai_sdk.mjs URL TOOL NUMBER`. Each input is a line of
// JSON, with the parts of it that came in a stream.
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, streamText } from "ai";

const [url, given, number] = process.argv.slice(2);
const { name, description, format, task, model, max_tokens } = JSON.parse(given);
const openai = createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" });
for (let i = 0; i < Number(number); i++) {
  const request = {
    model: openai.responses(model),
    tools: { [name]: openai.tools.customTool({ name, description, format }) },
    toolChoice: "required",
    prompt: task,
    maxOutputTokens: max_tokens,
    maxRetries: 0,
    providerOptions: { openai: { parallelToolCalls: false, store: false } },
  };
  let calls;
  let parts = null;
  if (i % 2) {
    calls = (await generateText(request)).toolCalls;
  } else {
    const result = streamText({ ...request, onError: ({ error }) => { throw error; } });
    parts = [];
    for await (const part of result.fullStream) {
      if (part.type === "tool-input-delta") parts.push(part.delta);
    }
    calls = await result.toolCalls;
  }
  console.log(JSON.stringify({ input: calls[0]?.input ?? null, parts }));
}
