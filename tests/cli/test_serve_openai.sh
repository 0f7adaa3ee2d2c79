#!/usr/bin/env bash
# OpenAI's own package as the client, one call or many at a time, and curl beside it.
python=$(bash "$(dirname "$0")/openai_env.sh") || { echo "skipped: OpenAI's package can't be had"; exit 77; }
. "$(dirname "$0")/lib.sh"
need_model
export tmp IMPRESS IMPRESS_MODEL
timeout 800 "$python" - <<'PY' || failures=1
import asyncio
import shutil
import typing

import openai
import pydantic

from serve import *

s = Server("--slots", "4", "--ctx-size", "1024", env={"IMPRESS_API_KEY": "key-of-anne-1"})
url = "http://127.0.0.1:%d/v1" % s.port
client = openai.OpenAI(base_url=url, api_key="key-of-anne-1", max_retries=0, timeout=600)
model = client.models.list().data[0].id
ok(client.models.retrieve(model).id == model, model)


def say(text, **fields):
    return dict(dict(model=model, messages=[{"role": "user", "content": text}], temperature=0, max_tokens=8), **fields)


def raises(kind, call, word):
    try:
        call()
        ok(False, "no %s: %s" % (kind.__name__, word))
    except kind as e:
        ok(word in str(e), (word, e))


# Chat, whole and streamed: the same text, the same usage, cached tokens that are true.
system = {"role": "system", "content": "You answer briefly. " + words(60, 3)}
messages = [system, {"role": "user", "content": "Say hello."}]
a = client.chat.completions.create(**say("", messages=messages))
text = a.choices[0].message.content
ok(text and a.choices[0].message.role == "assistant" and a.choices[0].finish_reason in ("stop", "length"), a)
ok(a.usage.total_tokens == a.usage.prompt_tokens + a.usage.completion_tokens, a.usage)
ok(a.usage.prompt_tokens_details.cached_tokens == 0, a.usage)
ok(a.model_extra["impress"]["way"] == "computed", a.model_extra)
with client.chat.completions.create(**say("", messages=messages), stream=True, stream_options={"include_usage": True}) as stream:
    chunks = list(stream)
ok("".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text, chunks)
usage = chunks[-1].usage
ok(usage.prompt_tokens == a.usage.prompt_tokens and usage.completion_tokens == a.usage.completion_tokens, usage)
ok(usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1, usage)
ok([c.choices[0].finish_reason for c in chunks if c.choices][-1] == a.choices[0].finish_reason, chunks[-2])
with client.chat.completions.stream(**say("", messages=messages)) as events:
    ok("".join(e.delta for e in events if e.type == "content.delta") == text, "as events of the package")

# A request's own fields, and the whole of a reply.
raw = client.chat.completions.with_raw_response.create(**say("", messages=messages), extra_body={"impress": {"cache": "off"}},
                                                       extra_headers={"X-Request-Id": "mine-7"})
ok(raw.headers["x-request-id"] == "mine-7" and raw.parse().usage.prompt_tokens_details.cached_tokens == 0, raw.headers)
parts = [{"type": "text", "text": "Say "}, {"type": "text", "text": "hello."}]
b = client.chat.completions.create(**say("", messages=[{"role": "user", "content": parts}], max_completion_tokens=2,
                                         max_tokens=openai.NOT_GIVEN, top_p=0.9, seed=3, presence_penalty=0.1,
                                         frequency_penalty=0.1, logit_bias={"5": -10}, user="u", n=1, stop=["zzz"]))
ok(b.usage.completion_tokens <= 2, b.usage)

# Completions, whole and streamed.
prompt = "Numbers: 1, 2, 3, 4, 5, 6, 7,"
c = client.completions.create(model=model, prompt=prompt, max_tokens=6, temperature=0, logprobs=2)
ok(" 8" in c.choices[0].text and "".join(c.choices[0].logprobs.tokens) == c.choices[0].text, c)
streamed = client.completions.create(model=model, prompt=prompt, max_tokens=6, temperature=0, stream=True)
ok("".join(e.choices[0].text for e in streamed) == c.choices[0].text, "streamed")

# Log-probabilities of a chat: the chosen token is the likeliest one at temperature 0.
l = client.chat.completions.create(**say("Say hello.", logprobs=True, top_logprobs=3)).choices[0]
tokens = l.logprobs.content
ok("".join(t.token for t in tokens) == l.message.content or l.finish_reason == "stop", tokens)
ok(all(len(t.top_logprobs) == 3 and t.top_logprobs[0].logprob == max(x.logprob for x in t.top_logprobs) for t in tokens), tokens)
ok(all(t.logprob == t.top_logprobs[0].logprob and bytes(t.bytes).decode("utf-8", "replace") == t.token for t in tokens), tokens)


# Structured output: the answer fits the schema, whatever the model would rather say.
class Verdict(pydantic.BaseModel):
    colour: typing.Literal["red", "green", "blue"]
    sure: bool


p = client.chat.completions.parse(**say("What colour is grass?", max_tokens=200, response_format=Verdict))
ok(p.choices[0].finish_reason == "stop" and isinstance(p.choices[0].message.parsed, Verdict), p)
schema = {"type": "json_schema", "json_schema": {"name": "v", "strict": True, "schema": Verdict.model_json_schema()}}
j = client.chat.completions.create(**say("What colour is the sea?", max_tokens=200, response_format=schema))
ok(set(json.loads(j.choices[0].message.content)) == {"colour", "sure"}, j)
# One that holds itself.
chain = {"type": "object", "properties": {"v": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
         "required": ["v", "next"], "additionalProperties": False}
chained = {"type": "json_schema", "json_schema": {"name": "c", "strict": True, "schema": chain}}
r = client.chat.completions.create(**say("A chain of 1, 2, 3 as JSON.", max_tokens=60, response_format=chained)).choices[0]
ok(r.message.content.replace(" ", "").replace("\n", "").startswith('{"v":'), r)
link = json.loads(r.message.content) if r.finish_reason == "stop" else None
while link:
    ok(set(link) == {"v", "next"} and isinstance(link["v"], int), r)
    link = link["next"]
o = client.chat.completions.create(**say("An object, please.", response_format={"type": "json_object"}, max_tokens=100))
ok(o.choices[0].finish_reason == "length" or isinstance(json.loads(o.choices[0].message.content), dict), o)

# A grammar that keeps ever more ways apart ends its request; what repeats itself inside of what repeats itself doesn't.
names = range(60)
ways = "root ::= s\ns ::= [^e]" + "".join(" | [^e] s t%d" % i for i in names)
ways += "".join('\nt%d ::= [^e] | ""' % i for i in names)
by_grammar = say("Say hello.", max_tokens=200, extra_body={"grammar": ways})
raises(openai.BadRequestError, lambda: client.chat.completions.create(**by_grammar), "in too many ways")
stars = client.chat.completions.create(**say("Say hello.", max_tokens=40, extra_body={"grammar": "root ::= ([A-Z]* [A-Z ]*)*"}))
ok(stars.choices[0].message.content.isupper() and stars.usage.completion_tokens > 1, stars)

# What goes wrong has the package's own kinds of exceptions.
raises(openai.NotFoundError, lambda: client.chat.completions.create(**say("x", model="gpt-17")), "gpt-17")
raises(openai.BadRequestError, lambda: client.chat.completions.create(**say("x", extra_body={"colour": 1})), "colour")
raises(openai.BadRequestError, lambda: client.chat.completions.create(**say("x", n=2)), "n")
raises(openai.BadRequestError, lambda: client.chat.completions.create(**say(words(900))), "maximum context length")
raises(openai.BadRequestError, lambda: client.chat.completions.create(**say("", messages=[])), "messages")
f = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
raises(openai.BadRequestError, lambda: client.chat.completions.create(**say("x", tools=[f])), "template knows no tools")
for schema in ({"$ref": "#"}, {"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"$ref": "#/$defs/a"}}}):
    endless = {"type": "json_schema", "json_schema": {"name": "e", "schema": schema}}
    raises(openai.BadRequestError, lambda: client.chat.completions.create(**say("x", response_format=endless)), "but itself")
raises(openai.AuthenticationError, lambda: openai.OpenAI(base_url=url, api_key="nobody", max_retries=0).models.list(), "key")


# Several at once, of both kinds: each gets what it gets alone.
async def together():
    many = openai.AsyncOpenAI(base_url=url, api_key="key-of-anne-1", max_retries=0, timeout=600)

    async def whole(i):
        r = await many.completions.create(model=model, prompt=count(10 * i), max_tokens=6, temperature=0)
        return r.choices[0].text

    async def parts(i):
        out = ""
        async for e in await many.completions.create(model=model, prompt=count(10 * i), max_tokens=6, temperature=0, stream=True):
            out += e.choices[0].text
        return out

    got = await asyncio.gather(*[kind(i) for i in range(4) for kind in (whole, parts)], shell())
    await many.close()
    return got


# curl, meanwhile, with streams that it prints as they come.
async def shell():
    if not shutil.which("curl"):
        return None
    body = json.dumps(dict(prompt=count(40), max_tokens=6, temperature=0, stream=True))
    run = await asyncio.create_subprocess_exec("curl", "-sSN", "-m", "600", "-H", "Authorization: Bearer key-of-anne-1", "-d", body,
                                               url + "/completions", stdout=asyncio.subprocess.PIPE)
    out = (await run.communicate())[0].decode()
    ok(run.returncode == 0 and out.rstrip().endswith("data: [DONE]"), out)
    return "".join(json.loads(line[6:])["choices"][0]["text"] for line in out.split("\n") if line.startswith("data: {"))


*got, curled = asyncio.run(together())
ok(all(got[2 * i] == got[2 * i + 1] and str(10 * i + 7) in got[2 * i] for i in range(4)), got)
ok(curled is None or "47" in curled, curled)
client.close()
ok(s.stop() == 0, "stop")

# Tools: called, streamed, and their result taken in. This model's own template knows none, so it gets another one.
hermes = os.path.join(os.environ["tmp"], "template.jinja")
open(hermes, "w").write(r"""{%- if tools %}{{- '<|im_start|>system\n<tools>' }}
{%- for t in tools %}{{- '\n' + (t | tojson) }}{%- endfor %}
{{- '\n</tools>\nCall as <tool_call>\n{"name": <name>, "arguments": <object>}\n</tool_call><|im_end|>\n' }}{%- endif %}
{%- for m in messages %}{%- if m.role == 'user' or m.role == 'system' or (m.role == 'assistant' and not m.tool_calls) %}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- elif m.role == 'assistant' %}{{- '<|im_start|>' + m.role }}{%- if m.content %}{{- '\n' + m.content }}{%- endif %}
{%- for c in m.tool_calls %}{%- if c.function %}{%- set c = c.function %}{%- endif %}
{{- '\n<tool_call>\n{"name": "' + c.name + '", "arguments": ' }}{{- c.arguments | tojson }}{{- '}\n</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\n' }}
{%- elif m.role == 'tool' %}{{- '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}
{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}""")
s = Server("--slots", "1", "--ctx-size", "1024", "--chat-template", hermes, store="none")
client = openai.OpenAI(base_url="http://127.0.0.1:%d/v1" % s.port, api_key="none", max_retries=0, timeout=600)
tool = {"type": "function", "function": {
    "name": "get_weather", "description": "The weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}}, "required": ["city"],
                   "additionalProperties": False}}}
ask = say("What is the weather in Oslo?", tools=[tool], tool_choice="required", max_tokens=200)
t = client.chat.completions.create(**ask)
ok(t.choices[0].finish_reason == "tool_calls" and len(t.choices[0].message.tool_calls) == 1, t)
call = t.choices[0].message.tool_calls[0]
ok(call.type == "function" and call.function.name == "get_weather" and call.id, call)
ok(json.loads(call.function.arguments)["city"] in ("Rome", "Oslo"), call)
# One that can't come to an end calls on, unless it may call only once.
on = dict(ask, max_tokens=100, logit_bias={"0": -100, "2": -100})
many, one = client.chat.completions.create(**on), client.chat.completions.create(**on, parallel_tool_calls=False)
ok(many.choices[0].finish_reason == "length" and len(many.choices[0].message.tool_calls) > 1, many)
ok(one.choices[0].finish_reason == "tool_calls" and len(one.choices[0].message.tool_calls) == 1, one)
ok(json.loads(one.choices[0].message.tool_calls[0].function.arguments)["city"] in ("Rome", "Oslo"), one)
deep = dict(tool, function=dict(tool["function"], parameters=chain))
t2 = client.chat.completions.create(**dict(ask, tools=[deep], max_tokens=60)).choices[0]
ok(t2.message.tool_calls[0].function.arguments.replace(" ", "").replace("\n", "").startswith('{"v":'), t2)
name, arguments = "", ""
for chunk in client.chat.completions.create(**ask, stream=True):
    for d in (chunk.choices[0].delta.tool_calls or []) if chunk.choices else []:
        name += d.function.name or ""
        arguments += d.function.arguments or ""
ok(name == "get_weather" and json.loads(arguments)["city"] in ("Rome", "Oslo"), (name, arguments))
# Cut by max_tokens within a call: what there is of it, and never the model's own marks; streamed it is the same.
for n in range(1, 20, 6):
    cut = client.chat.completions.create(**dict(ask, max_tokens=n)).choices[0]
    ok(cut.finish_reason == "length" and not cut.message.content, cut)
    told = "".join(c.function.arguments for c in cut.message.tool_calls or [])
    ok(n > 1 or not told, cut)
    streamed, said = "", ""
    for chunk in client.chat.completions.create(**dict(ask, max_tokens=n), stream=True):
        said += chunk.choices[0].delta.content or "" if chunk.choices else ""
        for d in (chunk.choices[0].delta.tool_calls or []) if chunk.choices else []:
            streamed += d.function.arguments or ""
    ok(streamed == told and not said, (n, told, streamed, said))
ok(told.startswith("{"), cut)
answer = client.chat.completions.create(**say("", tools=[tool], max_tokens=4, messages=[
    {"role": "user", "content": "What is the weather in Oslo?"}, t.choices[0].message.model_dump(exclude_none=True),
    {"role": "tool", "tool_call_id": call.id, "content": "Rain."}]))
ok(answer.usage.completion_tokens >= 1, answer)
never = client.chat.completions.create(**say("Say hello.", tools=[tool], tool_choice="none", max_tokens=4))
ok(not never.choices[0].message.tool_calls, never)
client.close()
ok(s.stop() == 0, "stop")
finish()
PY
finish
