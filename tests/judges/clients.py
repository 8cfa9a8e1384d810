"""The official Python clients against a running server: openai, anthropic, ollama.

    python clients.py http://127.0.0.1:8080

Exits with 1 at the first thing that a client does not understand or that is not the answer.
"""

import json
import sys

import anthropic
import ollama
import openai

ADDRESS = sys.argv[1].rstrip("/")
QUESTION = [{"role": "user", "content": "What is the capital of Portugal?"}]
ANSWER = "The capital of Portugal is Lisbon."
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "size": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["city", "size"],
    "additionalProperties": False,
}
PARAMETERS = {"type": "object", "properties": {"unit": {"type": "string", "enum": ["C", "F"]}}, "required": ["unit"], "additionalProperties": False}


def check(condition, what):
    if not condition:
        raise SystemExit(f"not as expected: {what}")


def openai_client():
    client = openai.OpenAI(base_url=f"{ADDRESS}/v1", api_key="none", max_retries=0)
    check([model.id for model in client.models.list()] == ["builtin"], "models")
    whole = client.chat.completions.create(model="builtin", messages=QUESTION, temperature=0)
    check(whole.choices[0].message.content == ANSWER and whole.choices[0].finish_reason == "stop", whole)
    check(whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens, whole.usage)
    text, chunks = "", []
    for chunk in client.chat.completions.create(model="builtin", messages=QUESTION, temperature=0, stream=True, stream_options={"include_usage": True}):
        chunks.append(chunk)
        if chunk.choices:
            text += chunk.choices[0].delta.content or ""
    check(text == ANSWER and not chunks[-1].choices and chunks[-1].usage.completion_tokens > 0, chunks[-1])
    check(chunks[0].choices[0].delta.role == "assistant" and len({chunk.id for chunk in chunks}) == 1, chunks[0])
    tools = [{"type": "function", "function": {"name": "set_unit", "parameters": PARAMETERS}}]
    called = client.chat.completions.create(model="builtin", messages=QUESTION, tools=tools, tool_choice="required", temperature=1.5, max_tokens=200)
    call = called.choices[0].message.tool_calls[0]
    check(call.function.name == "set_unit" and json.loads(call.function.arguments)["unit"] in "CF", call)
    with client.chat.completions.stream(model="builtin", messages=QUESTION, tools=tools, tool_choice="required", temperature=1.5, max_tokens=200) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    check(final.choices[0].message.tool_calls[0].function.name == "set_unit" and final.choices[0].finish_reason == "tool_calls", final)
    schema = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}}
    formed = client.chat.completions.create(model="builtin", messages=QUESTION, response_format=schema, temperature=1.5, max_tokens=200)
    check(set(json.loads(formed.choices[0].message.content)) == {"city", "size"}, formed)
    likely = client.chat.completions.create(model="builtin", messages=QUESTION, temperature=0, logprobs=True, top_logprobs=2)
    check("".join(token.token for token in likely.choices[0].logprobs.content).startswith(ANSWER), likely)
    continued = client.completions.create(model="builtin", prompt=["Once", "The capital"], max_tokens=4, echo=True, logprobs=1)
    check(len(continued.choices) == 2 and continued.choices[1].text.startswith("The capital"), continued)
    response = client.responses.create(model="builtin", input="What is the capital of Portugal?", temperature=0)
    check(response.output_text == ANSWER and response.status == "completed", response)
    with client.responses.stream(model="builtin", input=QUESTION, temperature=0) as stream:
        deltas = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        check(deltas == ANSWER and stream.get_final_response().output_text == ANSWER, deltas)
    function = {"type": "function", "name": "set_unit", "parameters": PARAMETERS, "strict": True}
    called = client.responses.create(model="builtin", input=QUESTION, tools=[function], tool_choice="required", temperature=1.5, max_output_tokens=200)
    check(called.output[-1].type == "function_call" and json.loads(called.output[-1].arguments)["unit"] in "CF", called)
    for wrong, kind in [({"model": "other"}, openai.NotFoundError), ({"n": 0}, openai.BadRequestError), ({"extra_body": {"frobnicate": 1}}, openai.BadRequestError)]:
        try:
            client.chat.completions.create(**{"model": "builtin", "messages": QUESTION, **wrong})
            check(False, wrong)
        except kind:
            pass


def anthropic_client():
    client = anthropic.Anthropic(base_url=ADDRESS, api_key="none", max_retries=0)
    whole = client.messages.create(model="builtin", max_tokens=64, messages=QUESTION)
    check(whole.content[0].text == ANSWER and whole.stop_reason == "end_turn" and whole.usage.output_tokens > 0, whole)
    with client.messages.stream(model="builtin", max_tokens=64, messages=QUESTION, system="Be brief.") as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    check(final.content[0].text == text and final.stop_reason == "end_turn", final)
    tool = {"name": "set_unit", "description": "Sets the unit", "input_schema": PARAMETERS}
    called = client.messages.create(model="builtin", max_tokens=200, messages=QUESTION, tools=[tool], tool_choice={"type": "any"})
    use = called.content[-1]
    check(called.stop_reason == "tool_use" and use.type == "tool_use" and use.input["unit"] in "CF", called)
    with client.messages.stream(model="builtin", max_tokens=200, messages=QUESTION, tools=[tool], tool_choice={"type": "tool", "name": "set_unit"}) as stream:
        final = stream.get_final_message()
    check(final.content[-1].input["unit"] in "CF", final)
    back = [*QUESTION, {"role": "assistant", "content": called.content}, {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "done"}]}]
    check(client.messages.create(model="builtin", max_tokens=16, messages=back, tools=[tool]).content, "after a tool")
    stopped = client.messages.create(model="builtin", max_tokens=64, messages=QUESTION, stop_sequences=[" Lisbon"])
    check(stopped.stop_reason == "stop_sequence" and stopped.stop_sequence == " Lisbon", stopped)
    check(client.messages.count_tokens(model="builtin", messages=QUESTION).input_tokens == whole.usage.input_tokens + whole.usage.cache_read_input_tokens, "count")
    try:
        client.messages.create(model="other", max_tokens=1, messages=QUESTION)
        check(False, "a model that is not there")
    except anthropic.NotFoundError as error:
        check(error.body["type"] == "error", error.body)


def ollama_client():
    client = ollama.Client(host=ADDRESS)
    check(client.list().models[0].model == "builtin", "tags")
    options = {"temperature": 0}
    whole = client.chat(model="builtin", messages=QUESTION, options=options)
    check(whole.message.content == ANSWER and whole.done and whole.eval_count > 0, whole)
    check("".join(part.message.content for part in client.chat(model="builtin", messages=QUESTION, options=options, stream=True)) == ANSWER, "a stream")
    check(client.generate(model="builtin", prompt="What is the capital of Portugal?", options=options).response == ANSWER, "generate")
    formed = client.chat(model="builtin", messages=QUESTION, format=SCHEMA, options={"temperature": 1.5, "num_predict": 200})
    check(set(json.loads(formed.message.content)) == {"city", "size"}, formed)
    check(client.ps().models[0].model == "builtin" and "completion" in client.show("builtin").capabilities, "ps, show")
    try:
        client.chat(model="other", messages=QUESTION)
        check(False, "a model that is not there")
    except ollama.ResponseError as error:
        check(error.status_code == 404, error)


for name, judge in [("openai", openai_client), ("anthropic", anthropic_client), ("ollama", ollama_client)]:
    judge()
    print(f"{name} {sys.modules[name].__version__ if hasattr(sys.modules[name], '__version__') else ''}: as expected")
