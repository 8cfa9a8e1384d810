"""JSON schemas, random ones over the keywords that are common and real ones that npm packages carry, at a temperature at which a model says anything: every answer that ended validates, by the
package jsonschema, or the schema was refused by the name of what cannot be followed.

    python schemas.py http://127.0.0.1:8080 COUNT [FOLDER WITH NPM PACKAGES (*.tgz) [COUNT OF THOSE]]
"""

import concurrent.futures
import json
import random
import re
import sys
import tarfile
import urllib.error
import urllib.request
from pathlib import Path

import jsonschema

ADDRESS, COUNT = sys.argv[1].rstrip("/"), int(sys.argv[2])
PACKAGES = sorted(Path(sys.argv[3]).glob("*.tgz")) if len(sys.argv) > 3 else []
REAL = int(sys.argv[4]) if len(sys.argv) > 4 else 150
FORMATS = ["date", "date-time", "time", "email", "uuid", "ipv4", "uri", "hostname"]


def schema(draw, depth=0):
    simple = ["string", "integer", "number", "boolean", "null", "enum", "const", "pattern", "format", "types", "multiple"]
    kind = draw.choice(simple if depth > 2 else simple + ["object", "object", "object", "array", "array", "anyOf", "oneOf", "allOf", "ref", "rare"])
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
    if kind == "format":
        return {"type": "string", "format": draw.choice(FORMATS)}
    if kind == "types":
        return {"type": draw.sample(["string", "integer", "boolean", "null"], 2), "maxLength": 5}
    if kind == "multiple":
        return {"type": "integer", "multipleOf": draw.choice([2, 5, 10]), "exclusiveMinimum": 0, "maximum": 100}
    if kind == "rare":
        return draw.choice([
            {"not": {"type": "string"}},
            {"type": "array", "items": {"type": "integer"}, "uniqueItems": True, "maxItems": 3},
            {"type": "array", "contains": {"const": 1}, "maxItems": 3},
            {"type": "object", "patternProperties": {"^x": {"type": "integer"}}, "additionalProperties": False, "maxProperties": 2},
            {"type": "object", "propertyNames": {"maxLength": 3}, "additionalProperties": {"type": "null"}, "maxProperties": 2},
            {"type": "object", "properties": {"a": {"type": "null"}}, "dependentRequired": {"a": ["b"]}},
            {"if": {"type": "string"}, "then": {"maxLength": 3}, "else": {"type": "null"}},
        ])
    if kind == "array":
        low = draw.randint(0, 2)
        extra = {"prefixItems": [schema(draw, depth + 1)]} if draw.random() < 0.3 else {}
        return {"type": "array", "items": schema(draw, depth + 1), "minItems": low, "maxItems": low + draw.randint(0, 2), **extra}
    if kind == "anyOf":
        return {"anyOf": [schema(draw, depth + 1) for _ in range(draw.randint(1, 3))]}
    if kind == "oneOf":
        return {"oneOf": [{"type": "object", "properties": {"kind": {"const": name}, "value": schema(draw, depth + 1)}, "required": ["kind"], "additionalProperties": False} for name in "ab"]}
    if kind == "allOf":
        return {"allOf": [{"type": "object", "properties": {"a": schema(draw, depth + 1)}, "required": ["a"]}, {"properties": {"b": {"type": "boolean"}}, "required": ["b"]}]}
    if kind == "ref":
        return {"$ref": "#/$defs/leaf"}
    names = draw.sample(["a", "b", "name", "x y", "größe", "id"], draw.randint(0, 4))
    return {
        "type": "object",
        "properties": {name: schema(draw, depth + 1) for name in names},
        "required": [name for name in names if draw.random() < 0.6],
        "additionalProperties": False if draw.random() < 0.8 else {"type": "boolean"},
    }


def real(packages):
    """The JSON schemas in npm packages that are whole in themselves, with the places where they stand."""
    for package in packages:
        with tarfile.open(package) as files:
            for member in files:
                if member.name.endswith(".json") and member.size < 1 << 20:
                    try:
                        found = json.load(files.extractfile(member))
                    except ValueError:
                        continue
                    if isinstance(found, dict) and {"$schema", "$id"} & found.keys() and {"properties", "definitions", "$defs", "oneOf"} & found.keys() and is_whole(found):
                        yield f"{package.name}: {member.name}", found


def ends():
    """Makes what ends a text, a list or an object more probable: the model would write on and on."""
    asked = lambda text: urllib.request.Request(f"{ADDRESS}/tokenize", json.dumps({"prompt": text, "add_special_tokens": False}).encode(), {"content-type": "application/json"})
    tokens = [json.load(urllib.request.urlopen(asked(text)))["tokens"] for text in ['"', "}", "]"]]
    return {str(ids[0]): 9 for ids in tokens if len(ids) == 1}


def is_whole(wanted):
    text = json.dumps(wanted)
    return all(f'"$id": "{reference.split("#")[0]}' in text for reference in re.findall(r'"\$ref": "([^#"][^"]*)', text))


def words(value):
    """All names and texts in a schema: one of them is what a refusal names."""
    if isinstance(value, dict):
        for name, below in value.items():
            yield name
            yield from words(below)
    elif isinstance(value, list):
        for below in value:
            yield from words(below)
    elif isinstance(value, str):
        yield value


def ask(job):
    number, place, wanted = job
    body = {
        "messages": [{"role": "user", "content": "Hello!"}],
        "temperature": 1.5,
        "seed": number,
        "max_tokens": 600,
        "logit_bias": ENDS,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": wanted}},
    }
    request = urllib.request.Request(f"{ADDRESS}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"})
    about = f"{place}: {json.dumps(wanted)[:600]}"
    try:
        answer = json.load(urllib.request.urlopen(request, timeout=120))
    except urllib.error.HTTPError as error:
        message = json.load(error)["error"]["message"]
        names_it = error.code == 400 and any(len(word) > 1 and word in message for word in words(wanted))
        return ("refused" if names_it else "failed"), f"{error.code} {message} for {about}"
    choice = answer["choices"][0]
    if choice["finish_reason"] != "stop":
        return "cut off", ""
    try:
        kind = jsonschema.validators.validator_for(wanted, default=jsonschema.Draft202012Validator)
        kind(wanted, format_checker=kind.FORMAT_CHECKER).validate(json.loads(choice["message"]["content"]))
    except (jsonschema.ValidationError, json.JSONDecodeError) as error:
        return "failed", f"{choice['message']['content']} for {about}: {error}"
    return "valid", ""


ENDS = ends()
drawn = [(f"number {number}", {**schema(random.Random(number)), "$defs": {"leaf": {"type": "string", "enum": ["leaf"]}}}) for number in range(COUNT)]
carried = list(real(PACKAGES))
carried = random.Random(1).sample(carried, min(REAL, len(carried)))
failed = False
with concurrent.futures.ThreadPoolExecutor(8) as pool:
    for name, schemas, least in [("random", drawn, 0.5), ("real", carried, 0.1)]:
        counts = {}
        for verdict, about in pool.map(ask, [(number, *job) for number, job in enumerate(schemas)]):
            counts[verdict] = counts.get(verdict, 0) + 1
            if verdict == "failed":
                print(f"{verdict}: {about[:900]}")
        print(f"{len(schemas)} {name} schemas: {counts}", flush=True)
        failed |= bool(counts.get("failed")) or counts.get("valid", 0) < least * len(schemas)
sys.exit(failed)
