"""Random JSON schemas over the keywords that are common, at a temperature at which a model says anything: every answer that ended validates, by the package jsonschema, or the schema was
refused by name.

    python schemas.py http://127.0.0.1:8080 [COUNT]
"""

import concurrent.futures
import json
import random
import sys
import urllib.error
import urllib.request

import jsonschema

ADDRESS, COUNT = sys.argv[1].rstrip("/"), int(sys.argv[2]) if len(sys.argv) > 2 else 500


def schema(draw, depth=0):
    simple = ["string", "integer", "number", "boolean", "null", "enum", "const", "pattern"]
    kind = draw.choice(simple if depth > 2 else simple + ["object", "object", "array", "anyOf", "ref"])
    if kind == "string":
        low = draw.randint(0, 3)
        return {"type": "string", "minLength": low, "maxLength": low + draw.randint(0, 6)}
    if kind == "integer":
        low = draw.randint(-50, 50)
        return {"type": "integer", "minimum": low, "maximum": low + draw.randint(0, 99)}
    if kind == "number":
        return {"type": "number", "minimum": 0, draw.choice(["maximum", "exclusiveMaximum"]): 10}
    if kind in ("boolean", "null"):
        return {"type": kind}
    if kind == "enum":
        return {"enum": draw.sample(["a", "b c", 1, 2.5, True, None, "ü\"\\"], draw.randint(1, 4))}
    if kind == "const":
        return {"const": draw.choice(["x", 7, False, None, {"k": [1]}])}
    if kind == "pattern":
        return {"type": "string", "pattern": draw.choice(["^[a-c]{1,4}$", "^\\d{2}-\\d{2}$", "^(yes|no)$"])}
    if kind == "array":
        low = draw.randint(0, 2)
        extra = {"prefixItems": [schema(draw, depth + 1)]} if draw.random() < 0.3 else {}
        return {"type": "array", "items": schema(draw, depth + 1), "minItems": low, "maxItems": low + draw.randint(0, 2), **extra}
    if kind == "anyOf":
        return {"anyOf": [schema(draw, depth + 1) for _ in range(draw.randint(1, 3))]}
    if kind == "ref":
        return {"$ref": "#/$defs/leaf"}
    names = draw.sample(["a", "b", "name", "x y", "größe", "id"], draw.randint(0, 4))
    return {
        "type": "object",
        "properties": {name: schema(draw, depth + 1) for name in names},
        "required": [name for name in names if draw.random() < 0.6],
        "additionalProperties": False if draw.random() < 0.8 else {"type": "boolean"},
    }


def ask(number):
    draw = random.Random(number)
    wanted = schema(draw)
    wanted = {**wanted, "$defs": {"leaf": {"type": "string", "enum": ["leaf"]}}}
    body = {
        "messages": [{"role": "user", "content": "Hello!"}],
        "temperature": 1.5,
        "seed": number,
        "max_tokens": 400,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": wanted}},
    }
    request = urllib.request.Request(f"{ADDRESS}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"})
    try:
        answer = json.load(urllib.request.urlopen(request, timeout=120))
    except urllib.error.HTTPError as error:
        message = json.load(error)["error"]["message"]
        return ("refused", message) if error.code == 400 else ("failed", f"{error.code} {message} for {json.dumps(wanted)}")
    choice = answer["choices"][0]
    if choice["finish_reason"] != "stop":
        return "cut off", ""
    try:
        jsonschema.Draft202012Validator(wanted).validate(json.loads(choice["message"]["content"]))
    except (jsonschema.ValidationError, json.JSONDecodeError) as error:
        return "failed", f"{choice['message']['content']} for {json.dumps(wanted)}: {error}"
    return "valid", ""


counts = {}
with concurrent.futures.ThreadPoolExecutor(8) as pool:
    for verdict, about in pool.map(ask, range(COUNT)):
        counts[verdict] = counts.get(verdict, 0) + 1
        if verdict in ("failed", "refused"):
            print(f"{verdict}: {about[:400]}")
print(f"{COUNT} schemas: {counts}")
sys.exit(0 if not counts.get("failed") and counts.get("valid", 0) > 0.8 * COUNT else 1)
