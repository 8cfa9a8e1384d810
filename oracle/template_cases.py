"""Small templates with what transformers' Jinja makes of them, for `crates/qhx-text/tests/suite/templates.rs`.

usage: template_cases.py [OUT.json]        (default fixtures/templates/cases.json; needs transformers, not torch)
"""

import json
import pathlib
import sys

from jinja2.exceptions import TemplateError
from transformers.utils.chat_template_utils import _compile_jinja_template

# What the templates see.
CONTEXT = {
    "messages": [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": " Hello, Wörld! "},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHi", "tool_calls": [
            {"type": "function", "function": {"name": "look_up", "arguments": {"city": "Zürich", "days": 3, "deep": {"x": [1, None]}}}},
            {"type": "function", "function": {"name": "add", "arguments": {}}},
        ]},
        {"role": "tool", "content": [{"type": "text", "text": "sunny"}, {"type": "image"}]},
        {"role": "user", "content": None},
    ],
    "tools": [{"type": "function", "function": {
        "name": "look_up", "description": "Looks \"things\" up\nin <books> & 'papers'",
        "parameters": {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": ["integer", "null"], "enum": [1, 2]}},
                       "required": ["b"]}}}],
    "add_generation_prompt": True,
    "bos_token": "<s>",
    "none_value": None,
    "zero": 0, "one": 1, "seven": 7, "minus": -7, "big": 9223372036854775807, "unsigned": 18446744073709551615,
    "half": 0.5, "tiny": 1e-7, "huge": 1.5e300, "third": 0.1, "whole": 3.0,
    "yes": True, "no": False,
    "empty": "", "blank": " \t\n", "word": "word", "text": "The quick  brown fox", "lines": "a\nb\r\nc\n\n d", "quote": "it's", "both": "'\"\\",
    "unicode": "äÖß😀日本", "tags": "<a href=\"x\">&amp;</a>",
    "numbers": [3, 1, 2], "mixed": [1, "a", None, True, 2.5, [1], {"k": "v"}], "nested": [[1, 2], [3, [4]]], "empty_list": [],
    "words": ["pear", "Apple", "fig", "apple"], "dict": {"b": 2, "a": 1, "C": 3}, "empty_dict": {},
    "people": [{"name": "Bo", "age": 30, "job": {"title": "Smith"}}, {"name": "al", "age": 25}, {"name": "Cy", "age": 30, "job": None}],
    "keys": {"items": "mine", "keys": 1, "get": 2, "a b": 3, "1": "one", "_x": 4},
}

# Expressions, printed.
EXPRESSIONS = """
1
-1
+1
- - 1
1.0
1e3
1E-7
1_000
0x1F
0b101
0o17
1.5e300
1e16
123456789012345678
'a'
"a\\n\\tb"
'\\x41\\u00e9\\U0001F600\\101'
'\\d\\é\\''
'a' 'b' "c"
true
True
false
none
None
[]
[1, 'a', none, true, 1.5]
[1, 2,]
()
(1,)
(1, 2)
1, 2
{}
{'a': 1, 'b': [1, {'c': none}]}
{'a': 1, 'a': 2,}
{1: 'x', true: 'y', 1.0: 'z', none: 0, (1, 2): 3}
{[1]: 2}
['it\\'s', "\\"", "'\\"", '\\\\', '\\n', '\\x00\\x7f\\xa0\\u200b', 'é😀']
mixed
nested
dict
unicode
[unicode, blank, both, quote]
big
unsigned
[half, tiny, huge, third, whole]
1 + 2
1 + 2.5
1 + true
'a' + 'b'
[1] + [2]
(1,) + (2,)
'a' + 1
1 + 'a'
[1] + (2,)
none + 1
missing + 1
1 + missing
dict + dict
7 - 2
'a' - 'b'
3 * 4
'ab' * 3
3 * 'ab'
'ab' * -1
'ab' * 0
[1, 2] * 2
(1,) * 3
'a' * 1.5
7 / 2
6 / 2
1 / 0
7 // 2
-7 // 2
7 // -2
7.5 // 2
-7.5 // 2
7 % 3
-7 % 3
7 % -3
-7.5 % 2
7.5 % -2
6 % -3
1 // 0
1 % 0
1.0 % 0
2 ** 10
2 ** -1
2 ** 0.5
-2 ** 2
2 ** 3 ** 2
0 ** 0
0 ** -1
10 ** 18
1 + 2 * 3 - 4 / 2
(1 + 2) * 3
1 ~ 2
1 ~ 'a' ~ none ~ true ~ 1.5 ~ [1]
'a' ~ missing ~ 'b'
1 + 2 ~ 3 + 4
1 ~ 2 * 3
1 == 1
1 == 1.0
1 == true
'1' == 1
none == none
missing == missing
missing == none
[1, [2]] == [1, [2]]
[1] == (1,)
{'a': 1, 'b': 2} == {'b': 2, 'a': 1}
{'a': 1} == {'a': 2}
1 != 2
'a' != 'a'
1 < 2
1 < 2 < 3
1 < 3 < 2
(1 < 3) < 2
1 <= 1 >= 1
2 > 1 == 1
'a' < 'b'
'B' < 'a'
'a' < 1
none < 1
missing < 1
[1, 2] < [1, 3]
[1] < [1, 0]
(1, 'a') < (1, 'b')
1.5 < 2
true < 2
big < 9223372036854775808.0
1 in [1, 2]
4 not in [1, 2]
'a' in 'abc'
'' in 'abc'
1 in 'abc'
'a' in dict
'z' not in dict
1 in 5
'x' in missing
'role' in messages[0]
[1] in [[1]]
1 in (1, 2)
3 in range(5)
3 in range(0, 5, 2)
'a' in none
not true
not not true
not 1 == 2
not missing
true and false
1 and 2
0 and 2
'' or 'x'
none or missing or 0
1 or 1 / 0
0 and 1 / 0
1 and '' or 'c'
not 1 and 2
1 if true else 2
1 if false else 2
1 if false
'a' if 0 else 'b' if 0 else 'c'
'a' if 1 else 'b' if 0 else 'c'
('a' if 0 else 'b') ~ 'c'
(1 if false) is defined
[1 if true else 2, 3]
x if x is defined else 'd'
missing
missing.a
missing['a']
missing[0]
missing()
missing.a.b
messages.a
messages.a.b
messages[99]
messages[99].role
messages[0].role
messages[0]['role']
messages[0].missing
messages[0].missing.more
messages[0]['missing']
messages[-1].role
messages.0.role
messages[1:][0].role
messages[0].content[0]
messages[0].content[-1]
messages[0].content[99]
messages[0].content['x']
unicode[1] ~ unicode[-1] ~ unicode[5]
dict.a
dict['a']
dict.items
keys.items
keys['items']
keys['a b']
keys[1]
keys['1']
keys._x
keys.get('keys')
dict.__class__
dict['__class__']
word.__class__.__mro__
word._private
numbers.append
numbers.append(1)
dict.update({'a': 2})
dict.pop('a')
dict[[1]]
5[0]
'abc'[1:]
'abc'[:-1]
'abc'[::-1]
'abcdef'[1:5:2]
'abcdef'[5:1:-2]
'abcdef'[-3:]
'abcdef'[10:]
'abcdef'[-100:2]
unicode[1:4]
unicode[::-1]
numbers[1:]
numbers[:1]
numbers[::-1]
numbers[::2]
numbers[5:]
numbers[-2:]
numbers[::0]
(1, 2, 3)[1:]
range(10)[2:5]
range(10)[::-2]
missing[1:]
dict[1:]
none_value[1:]
numbers['a':]
numbers[1, 2]
range(3)
range(3) | list
range(1, 4) | list
range(5, 0, -2) | list
range(0, 10, 3)
range(0)
range(1, 2, 0)
range(100001)
range('a')
range(3)[1]
range(3)[-1]
range(3)[5]
range(3) | length
range(3) == range(0, 3)
dict(a=1, b=2)
dict({'a': 1}, b=2)
dict([['a', 1], ['b', 2]])
dict(1)
dict(a=1).a
dict(**{'x': 1})
namespace(a=1)
namespace(a=1).a
namespace({'a': 1}, b=2).b
namespace(a=1).b
namespace(a=1)['a']
namespace(_a=1)
namespace(a='x', b=[1])
'a' in namespace(a=1)
namespace(a=1) == namespace(a=1)
namespace(a=1) | tojson
cycler(1, 2).next()
cycler()
joiner(',')() ~ 'a'
raise_exception('Bad: ' ~ 1)
raise_exception(missing)
raise_exception([1, 'a'])
raise_exception()
strftime_now('plain')
strftime_now()
strftime_now(1)
undefined_function()
word()
word.upper
'a'.upper()
'Ab'.lower()
'hello world foo'.title()
"it's a dog's".title()
'hELLO wORLD'.capitalize()
'aBc'.swapcase()
'ß'.upper()
'Straße'.casefold()
'ΑΣ'.lower()
'  a b '.strip() ~ '|'
'  a b '.lstrip() ~ '|'
'  a b '.rstrip() ~ '|'
'xxaxx'.strip('x')
'xyaxy'.strip('yx')
'xxaxx'.lstrip('x')
'xxaxx'.rstrip('x')
'\\x1c\\x1f a\\x1d'.strip() ~ '|'
'a'.strip(none)
'a'.strip(1)
' a  b c '.split()
' a  b c '.split(none, 1)
'a,b,c'.split(',')
'a,b,c'.split(',', 1)
'a,b,c'.split(',', 0)
'a,b,c'.split(',', -1)
'a,b,c'.rsplit(',', 1)
' a b c '.rsplit(none, 1)
'a b c'.rsplit(maxsplit=1)
'a,b'.split(sep=',')
'abc'.split('')
''.split()
''.split(',')
'a||b'.split('||')
lines.splitlines()
lines.splitlines(true)
'a\\u2028b\\x0bc'.splitlines()
''.splitlines()
'abc'.startswith('ab')
'abc'.startswith(('x', 'a'))
'abc'.startswith('b', 1)
'abc'.startswith('')
'abc'.startswith(1)
'abc'.endswith('bc')
'abc'.endswith(('x', 'c'))
'abc'.endswith('b', 0, 2)
'abc'.startswith(['a'])
'aXbXc'.replace('X', '-')
'aXbXc'.replace('X', '-', 1)
'abc'.replace('', '-')
'abc'.replace('x', 'y')
'aaa'.replace('aa', 'b')
'abc'.replace('a')
','.join(['a', 'b'])
','.join('abc')
','.join([1])
','.join(dict)
'abcabc'.find('c')
'abcabc'.find('c', 3)
'abcabc'.find('z')
'abcabc'.rfind('c')
unicode.find('😀')
'abc'.index('b')
'abc'.index('z')
'abcabc'.rindex('a')
'abcabc'.count('b')
'abc'.count('')
'aaaa'.count('aa')
'abc'.count('a', 1)
'12'.isdigit()
'1.2'.isdigit()
''.isdigit()
'²'.isdigit()
'²'.isdecimal()
'½'.isnumeric()
'abc'.isalpha()
'a1'.isalnum()
'a 1'.isalnum()
' \\n'.isspace()
'abc'.islower()
'aBc'.islower()
'ABC1'.isupper()
'123'.isupper()
'Hello World'.istitle()
'Hello world'.istitle()
'abc'.isascii()
unicode.isascii()
'7'.zfill(3)
'-7'.zfill(4)
'+'.zfill(3)
'ab'.center(6) ~ '|'
'ab'.center(7, '*')
'abc'.center(6, '*')
'ab'.ljust(4, '.') ~ '|'
'ab'.rjust(4)
'ab'.rjust(4, 'xy')
'a=b=c'.partition('=')
'a=b=c'.rpartition('=')
'abc'.partition('=')
'abc'.rpartition('=')
'abc'.partition('')
'<a>b'.removeprefix('<a>')
'b</a>'.removesuffix('</a>')
'abc'.removeprefix('x')
'a\\tb\\n\\tc'.expandtabs(4)
'abc'.nothing
'abc'.nothing()
'{} and {}'.format(1, 'x')
'{0}{1}{0}'.format('a', 'b')
'{a}-{b}'.format(a=1, b=none)
'{}{}'.format(1)
'{0}{}'.format(1, 2)
'{x}'.format(y=1)
'{{}}{}'.format(1)
'{'.format(1)
'}'.format(1)
'{0.name}'.format(people[0])
'{0[name]} {0[age]}'.format(people[0])
'{0[0]}'.format(numbers)
'{!r} {!s}'.format('a', 'b')
'{:>5}|{:<5}|{:^5}|{:*^7}'.format('a', 'b', 'c', 'd')
'{:5}|{:5}'.format('a', 1)
'{:05d}|{:+d}|{: d}|{:,}|{:_}'.format(42, 42, 42, 1234567, 1234567)
'{:x} {:X} {:o} {:b} {:#x} {:c}'.format(255, 255, 8, 5, 255, 65)
'{:.2f} {:8.3f} {:e} {:.3e} {:g} {:g} {:%} {:.1%}'.format(1.005, 3.14159, 12345.678, 0.00012, 0.0001, 1e10, 0.5, 0.123)
'{} {:.3} {:10.2}|'.format(1.5, 3.14159, 1234.5)
'{:.2} {:.2f}'.format(2.0, 3)
'{:.2}'.format('abcdef')
'{:{}}|{:>{w}}'.format('a', 4, 'b', w=3)
'{:d}'.format('a')
'{:d}'.format(1.5)
'{:s}'.format(1)
'{} {}'.format(true, [1, 'a'])
'{:5}'.format([1])
'{:5}'.format(none)
'{:05}'.format(-3)
'{:=+6}'.format(3)
'{a}'.format_map({'a': 1})
'%s and %s' % (1, 'x')
'%s' % 'a'
'%s' % [1, 2]
'%s' % none
'%d %i %5d|%-5d|%05d|%+d' % (1, 2, 3, 4, 5, 6)
'%d' % 3.9
'%d' % 'a'
'%x %X %o %#x' % (255, 255, 8, 255)
'%.2f %8.3f|%e %g' % (1.005, 3.14159, 12345.678, 0.0001)
'%5s|%-5s|%.2s' % ('a', 'b', 'cde')
'%r %s' % ('a', 'a')
'%c%c' % ('a', 66)
'%%'  % ()
'100%' % ()
'%s' % ()
'%s' % (1, 2)
'a' % 1
'%(a)s %(b)d' % {'a': 'x', 'b': 2}
'%(a)s' % {'b': 1}
'%*d' % (5, 1)
'%.3d' % 5
'%q' % 1
'%s %s'|format(1, 'b')
'%(a)s'|format(a=1)
'%s'|format()
[1, 2].index(2)
[1, 2].index(3)
[1, 2, 1].count(1)
[1, 2].copy()
(1, 2).index(2)
dict.items()
dict.keys()
dict.values()
dict.items() | list
dict.keys() | list
dict.values() | list
dict.items() | length
dict.items()[0]
dict.get('a')
dict.get('z')
dict.get('z', 'd')
dict.get()
dict.copy()
empty_dict.items() | list
'a' in dict.keys()
1 in dict.values()
('a', 1) in dict.items()
whole.is_integer()
half.is_integer()
seven.bit_length()
dict | tojson
messages | tojson
tools | tojson
tools | tojson(indent=2)
tools | tojson(indent=4, sort_keys=true)
tools | tojson(separators=(',', ':'))
{'b': 1, 'a': {'d': 1, 'c': 2}} | tojson(sort_keys=true)
[unicode, both, '/', '\\x00\\x1f\\x7f\\u2028'] | tojson
unicode | tojson(ensure_ascii=true)
[1.0, 1e20, 1e-7, 0.1, -0.0, big, unsigned] | tojson
[true, none, 'x'] | tojson(indent=0)
[1, [2, {}], []] | tojson(indent='--')
{1: 1, none: 2, true: 3, 1.5: 4} | tojson
{1: 1, 'a': 2} | tojson(sort_keys=true)
{(1, 2): 1} | tojson
(1, 2) | tojson
missing | tojson
range(3) | tojson
dict.items() | tojson
[] | tojson(indent=2)
{} | tojson(indent=2)
1 | tojson(nothing=1)
dict | tojson(true, 2)
numbers | join
numbers | join(', ')
mixed | join('|')
people | join(', ', attribute='name')
people | join(', ', 'job.title')
missing | join(',')
'abc' | join('-')
dict | join
none | join
'  a ' | trim ~ '|'
'xax' | trim('x')
5 | trim
none | trim
missing | trim ~ '|'
numbers | length
'äö' | length
dict | length
missing | length
5 | length
none | count
(numbers | map('string')) | length
word | upper
'ÄB' | lower
5 | upper
none | upper
'hello wORLD-foo (bar) it\\'s' | title
'hELLO' | capitalize
'aXbX' | replace('X', '-')
'aXbX' | replace('X', '-', 1)
123 | replace(2, 'x')
missing | default('d')
none | default('d')
'' | default('d')
'' | default('d', true)
missing | d
0 | d('x', boolean=true)
numbers | first
'abc' | first
empty_list | first
(empty_list | first) is defined
dict | first
missing | first
5 | first
numbers | last
'abc' | last
empty_list | last
dict | last
range(5) | last
'abc' | list
dict | list
missing | list
5 | list
5 | string
none | string
[1, 'a'] | string
'a' | string
'42' | int
'42.7' | int
' 42 ' | int
'abc' | int
'abc' | int(7)
'ff' | int(base=16)
'0xff' | int(base=16)
3.9 | int
-3.9 | int
true | int
none | int
none | int(5)
missing | int
'1e3' | int
'1_000' | int
'1.5' | float
'abc' | float
'abc' | float(1.5)
3 | float
none | float
'inf' | float
'nan' | float
' 1e3 ' | float
2.5 | round
3.5 | round
2.675 | round(2)
42.55 | round(1)
42.55 | round(1, 'floor')
42.51 | round(1, 'ceil')
5 | round
15 | round(-1)
25 | round(-1)
1234.5 | round(-2)
'a' | round
2.5 | round(0, 'x')
-5 | abs
-1.5 | abs
'a' | abs
numbers | map('string') | list
numbers | map('string')  | join(',')
words | map('upper') | list
words | map('replace', 'p', 'q') | list
people | map(attribute='name') | list
people | map(attribute='job.title') | list
people | map(attribute='job.title', default='none') | list
people | map(attribute='nothing') | list
people | map(attribute='nothing', default='x') | list
nested | map('first') | list
nested | map(attribute=0) | list
nested | map('length') | list
numbers | map | list
empty_list | map('nothing') | list
missing | map('upper') | list
words | map('nothing') | list
(words | map('upper')) is defined
true if (empty_list | map('upper')) else false
true if (words | select('equalto', 'zzz')) else false
true if (words | select('equalto', 'zzz') | list) else false
numbers | select('odd') | list
numbers | select('greaterthan', 1) | list
numbers | reject('odd') | list
mixed | select | list
mixed | reject | list
mixed | select('string') | list
mixed | select('none') | list
numbers | select('in', [1, 2]) | list
people | selectattr('age', 'equalto', 30) | map(attribute='name') | list
people | selectattr('age', '==', 30) | list | length
people | selectattr('job') | map(attribute='name') | list
people | selectattr('job', 'defined') | map(attribute='name') | list
people | selectattr('job.title', 'defined') | map(attribute='name') | list
people | rejectattr('age', 'gt', 26) | map(attribute='name') | list
people | rejectattr('job') | map(attribute='name') | list
messages | selectattr('role', 'equalto', 'user') | list | length
people | selectattr | list
numbers | select('nothing') | list
['b', 'a', 'B', 'a', 'A'] | unique | list
['b', 'a', 'B', 'a', 'A'] | unique(true) | list
[1, 1.0, true, 2] | unique | list
people | unique(attribute='age') | map(attribute='name') | list
[[1], [1]] | unique | list
numbers | sort
numbers | sort(reverse=true)
words | sort
words | sort(case_sensitive=true)
words | sort(true)
people | sort(attribute='name') | map(attribute='name') | list
people | sort(attribute='age,name') | map(attribute='name') | list
people | sort(attribute='age', reverse=true) | map(attribute='name') | list
mixed | sort
[none, 1] | sort
[[2, 'a'], [1, 'b']] | sort
dict | sort
[2.5, 1, true, 0] | sort
dict | dictsort
dict | dictsort(true)
dict | dictsort(by='value')
dict | dictsort(false, 'value', true)
dict | dictsort(by='nothing')
numbers | dictsort
people | groupby('age')
people | groupby('age') | map(attribute='grouper') | list
(people | groupby('age'))[0].list | map(attribute='name') | list
people | groupby('job.title', default='-') | map('first') | list
['b', 'A', 'a'] | map('upper') | list
dict | items | list
missing | items | list
numbers | items | list
numbers | reverse | list
'abc' | reverse
dict | reverse | list
numbers | reverse | first
5 | reverse
numbers | sum
[1.5, 2] | sum
people | sum(attribute='age')
numbers | sum(start=10)
[[1], [2]] | sum(start=[])
['a'] | sum
empty_list | sum
numbers | min
numbers | max
words | min
words | max
people | max(attribute='age')
(empty_list | min) is defined
mixed | min
lines | indent
lines | indent(2)
lines | indent(2, true)
lines | indent(2, true, true)
lines | indent(width=1, blank=true)
lines | indent('> ')
'a\\nb' | indent(first=true)
'' | indent
5 | indent
range(7) | batch(3) | list
range(7) | batch(3, 'x') | list
range(7) | slice(3) | list
range(7) | slice(3, 'x') | list
range(2) | slice(4) | list
empty_list | batch(2) | list
range(3) | slice(0) | list
'Hello, big-world_x 42!' | wordcount
'' | wordcount
tags | escape
tags | e
quote | e
tags | safe
5 | escape
(tags | escape) ~ '<'
(tags | safe) + '<'
'<' + (tags | safe)
(tags | escape) + (quote | escape)
tags | safe | escape
tags | safe | upper
tags | safe | length
'ab' | center(7) ~ '|'
'a' | center ~ '|'
'foo bar baz qux' | truncate(9)
'foo bar baz qux' | truncate(9, true)
'foo bar baz qux' | truncate(11)
'foo bar baz qux' | truncate(11, false, '...', 0)
'foo bar' | truncate(2)
'a b/ü&c' | urlencode
{'a': 1, 'b c': 'x&y/'} | urlencode
[['a', 1], ['b', 'ü']] | urlencode
{'class': 'a', 'id': none, 'x': '<"'} | xmlattr
{'class': 'a'} | xmlattr(false)
{'a b': 1} | xmlattr
'abc' | attr('upper')()
dict | attr('a')
dict | attr('nothing')
word | nothing
word | nothing.more
word | upper | lower | capitalize
-1 | abs
-5 | abs + 1
'a' ~ 'b' | upper
numbers | sort | join(',') | length
missing is defined
missing is undefined
word is defined
messages[0].tool_calls is defined
messages[2].tool_calls is defined
messages[2].tool_calls is not none
none is none
none_value is none
none_value is defined
0 is none
missing is none
word is string
5 is string
(word | safe) is string
dict is mapping
numbers is mapping
namespace() is mapping
numbers is sequence
word is sequence
dict is sequence
5 is sequence
none is sequence
range(3) is sequence
missing is sequence
dict.items() is sequence
(numbers | map('string')) is sequence
numbers is iterable
word is iterable
5 is iterable
none is iterable
missing is iterable
namespace() is iterable
(numbers | map('string')) is iterable
5 is number
5.5 is number
true is number
'5' is number
5 is integer
true is integer
5.0 is integer
5.0 is float
5 is float
true is boolean
1 is boolean
true is true
1 is true
false is false
0 is false
4 is even
3 is odd
4.0 is even
'a' is even
9 is divisibleby 3
9 is divisibleby(2)
9 is divisibleby 0
1 is eq 1
1 is equalto 1.0
1 is == 1
1 is ne 2
1 is lt 2
2 is gt(1)
2 is ge 2
1 is le 0
1 is in [1, 2]
1 is not in [1, 2]
'a' is in 'abc'
none is sameas none
1 is sameas true
dict is sameas dict
[1] is sameas [1]
range is callable
word is callable
word.upper is callable
missing is callable
'abc' is lower
'ABC' is upper
'Abc' is lower
'' is lower
5 is lower
tags is escaped
(tags | safe) is escaped
'upper' is filter
'nothing' is filter
word is nothing
word is not defined
word is not string and true
not word is string
1 is defined and 2 is defined or false
word is string == true
5 is divisibleby 5 if true else 'x'
word is defined is string
messages | map(attribute='content') | select('string') | map('trim') | join('/')
messages[2].tool_calls[0].function.arguments | tojson
messages[2].content.split('</think>')[-1].lstrip('\\n')
messages[2]['content'].split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n')
(messages | selectattr('role', 'equalto', 'tool') | list | first).content[0].text
messages[3].content is string or messages[3].content is not mapping and messages[3].content is iterable
messages[::-1] | map(attribute='role') | join(' ')
messages[0].role.upper().lower().title()
tools[0].function.parameters.properties.items() | list
tools[0].function.parameters.properties | dictsort
"'" ~ '"' ~ '\\\\'
{'a': {'b': {'c': 1}}}.a.b.c
[[1, 2], [3]][0][1]
{'x': 1}['x']
(1, 2)[0]
'abc'.upper()[0]
[].x
[1,2,3]|length > 2 and 'yes' or 'no'
1 if 2 in [1, 2] else 0
"%.1f" % 2.25 ~ "%.0f" % 0.5
1.0 ~ ' ' ~ 100000.0 ~ ' ' ~ 1e15 ~ ' ' ~ 1e16 ~ ' ' ~ 0.0001 ~ ' ' ~ 0.00001
-0.0
7 // 2.0
1e308 * 10
2 ** 0.5 ** 2
""".strip("\n").split("\n")  # fmt: skip

# Whole templates.
TEMPLATES = [
    "", "\n", "a\n", "a\n\n", "plain { text } % } }} %}", "a{# comment #}b", "a\n{# comment #}\nb", "a {#- comment -#} b", "a\n  {# c #}  \nb",
    "{#{{ x }}#}y", "{# {% if %} #}z", "{# open", "{{ 1 }}\n{{ 2 }}\n", "{{ 1 -}}\n  {{- 2 }}", "a  {{- 1 -}}  b", "a  {{ 1 }}  b", "a  {{+ 1 }}  b",
    "{{ 1 }", "{{ }}", "{{ 1 2 }}", "{{ 'a }}", "{{ [1, 2 }}", "{{ (1 }}", "{{ {'a': {'b': 1}} }}", "{{ {'a': {'b': 1}}}}", "{{ '}}' }}", "{{ '%}' }}",
    "{% if true %}\nx\n{% endif %}\ny", "  {% if true %}\n  x\n  {% endif %}\n  y", "a {% if true %} b {% endif %} c", "  {%+ if true %}x{% endif %}",
    "{% if true +%}\nx{% endif %}", "{% if true -%}\n\n  x{% endif %}", "x\n\n  {%- if true %}y{%- endif %}", "\t{% if true %}\tx{% endif %}",
    "{%- if true -%}  x  {%- endif -%}  y", "x {% if true %}\r\ny\r\n{% endif %}\r\nz\r\n", "a\u00a0{% if true %}b{% endif %}", "\n  \n  {% if true %}b{% endif %}",
    "{% if zero %}a{% elif one %}b{% else %}c{% endif %}", "{% if zero %}a{% elif zero %}b{% else %}c{% endif %}", "{% if zero %}a{% endif %}",
    "{% if one: %}a{% endif %}", "{% if %}a{% endif %}", "{% if one %}a", "{% if one %}a{% endfor %}", "{% endif %}", "{% else %}", "{% nothing %}", "{% 1 %}",
    "{% if one, zero %}a{% endif %}", "{% if (1 if zero else 2) %}a{% endif %}", "{% if not zero and one %}a{% endif %}",
    "{% for x in numbers %}{{ x }},{% endfor %}", "{% for x in numbers %}{{ x }}{% else %}none{% endfor %}", "{% for x in [] %}{{ x }}{% else %}none{% endfor %}",
    "{% for x in missing %}{{ x }}{% else %}none{% endfor %}", "{% for x in none %}{% endfor %}", "{% for x in 5 %}{% endfor %}", "{% for c in word %}{{ c }}.{% endfor %}",
    "{% for k in dict %}{{ k }}{% endfor %}", "{% for k, v in dict.items() %}{{ k }}={{ v }};{% endfor %}", "{% for k, v in dict | items %}{{ k }}={{ v }};{% endfor %}",
    "{% for k, v in dict | dictsort %}{{ k }}={{ v }};{% endfor %}", "{% for a, b in nested %}{{ a }}{{ b }};{% endfor %}", "{% for a, (b, c) in [[1, [2, 3]]] %}{{ a }}{{ b }}{{ c }}{% endfor %}",
    "{% for (a, b) in nested %}{{ a }}{% endfor %}", "{% for a, b, c in nested %}{{ a }}{% endfor %}", "{% for a, in [[1]] %}{{ a }}{% endfor %}", "{% for x in 1, 2 %}{{ x }}{% endfor %}",
    "{% for x in numbers if x > 1 %}{{ x }}{{ loop.index }}{{ loop.length }}{{ loop.last }};{% endfor %}", "{% for x in numbers if x > 5 %}{{ x }}{% else %}none{% endfor %}",
    "{% for m in messages if m.role == 'user' %}{{ loop.index0 }}{% endfor %}",
    "{% for x in numbers %}{{ loop.index }}{{ loop.index0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.revindex }}{{ loop.revindex0 }};{% endfor %}",
    "{% for x in numbers %}{{ loop.previtem }}<{{ x }}>{{ loop.nextitem }};{% endfor %}", "{% for x in numbers %}{{ loop.previtem is defined }}{{ loop.nextitem is defined }};{% endfor %}",
    "{% for x in numbers %}{{ loop.cycle('a', 'b') }}{% endfor %}", "{% for x in numbers %}{{ loop.cycle() }}{% endfor %}", "{% for x in [1, 1, 2, 2, 1] %}{{ loop.changed(x) }};{% endfor %}",
    "{% for x in numbers %}{{ loop.depth }}{{ loop.depth0 }}{% endfor %}", "{% for x in numbers %}{{ loop.nothing }}{% endfor %}", "{% for x in numbers %}{{ loop }}{% endfor %}",
    "{% for x in numbers %}{% for y in 'ab' %}{{ loop.index }}{% endfor %}{{ loop.index }};{% endfor %}", "{{ loop }}", "{{ loop.index }}", "{% set loop = 5 %}{{ loop }}",
    "{% for loop in numbers %}{% endfor %}", "{% for x in numbers %}{% set loop = 1 %}{% endfor %}",
    "{% for x in numbers %}{% if x == 1 %}{% break %}{% endif %}{{ x }}{% endfor %}", "{% for x in numbers %}{% if x == 1 %}{% continue %}{% endif %}{{ x }}{% endfor %}",
    "{% for x in numbers %}{% break %}{% else %}e{% endfor %}", "{% for x in numbers %}{% continue %}{% else %}e{% endfor %}", "{% break %}", "{% for x in numbers %}{% macro m() %}{% break %}{% endmacro %}{% endfor %}",
    "{% for x in numbers %}{% for y in numbers %}{% break %}{% endfor %}{{ x }}{% endfor %}", "{% for x in numbers %}{% set t %}{% break %}{% endset %}{{ x }}{% endfor %}!",
    "{% for x in range(3) %}{{ x }}{% endfor %}{{ x }}", "{% set x = 9 %}{% for x in numbers %}{{ x }}{% endfor %}{{ x }}", "{% for x in numbers %}{% set y = x %}{% endfor %}{{ y }}",
    "{% set y = 0 %}{% for x in numbers %}{{ y }}{% set y = x %}{{ y }};{% endfor %}{{ y }}", "{% set ns = namespace(n=0) %}{% for x in numbers %}{% set ns.n = ns.n + x %}{% endfor %}{{ ns.n }}",
    "{% for x in [1, [2, [3]]] recursive %}{{ loop(x) if x is sequence else x }}{{ loop.depth }};{% endfor %}", "{% for x in [1] %}{{ loop([2]) }}{% endfor %}",
    "{% for x in numbers | map('string') %}{{ x }}{{ loop.last }}{% endfor %}", "{% for x in numbers | map('string') %}{{ loop.length }}{{ loop.revindex }}{% endfor %}", "{% for x in numbers | reverse %}{{ x }}{% endfor %}",
    "{% set ns = namespace(done=false) %}{% for x in numbers if not ns.done %}{{ x }}{% set ns.done = true %}{% endfor %}",
    "{% for x in numbers %}{{ x }}{% endfor %}{% for x in numbers -%}  {{ x }}  {%- endfor %}", "{% for x in numbers %}\n- {{ x }}\n{% endfor %}\nend", "{% for in numbers %}{% endfor %}", "{% for x numbers %}{% endfor %}",
    "{% set x = 1 %}{{ x }}", "{% set x = 1, 2 %}{{ x }}", "{% set a, b = 1, 2 %}{{ a }}{{ b }}", "{% set (a, b) = [1, 2] %}{{ a }}{{ b }}", "{% set a, b = [1] %}", "{% set a, b = 5 %}", "{% set a, b = 'xy' %}{{ b }}{{ a }}",
    "{% set x = 1 if zero else 2 %}{{ x }}", "{% set x %}a{{ 1 }}b{% endset %}{{ x }}{{ x | length }}", "{% set x | upper %}abc{% endset %}{{ x }}", "{% set x | trim | replace('a', 'b') %} a {% endset %}{{ x }}|",
    "{% set x %}{% set y = 1 %}{% endset %}{{ y }}", "{% set none = 1 %}", "{% set true = 1 %}", "{% set x.y = 1 %}", "{% set word.y = 1 %}", "{% set dict.y = 1 %}", "{% set ns = namespace() %}{% set ns.x = 1 %}{{ ns.x }}{{ ns }}",
    "{% set ns = namespace() %}{% set ns._x = 1 %}", "{% set ns = namespace(a=1) %}{% set ns.a, ns.b = 2, 3 %}{{ ns.a }}{{ ns.b }}", "{% set ns = namespace() %}{% set ns.t %}abc{% endset %}{{ ns.t }}", "{% set messages = messages[1:] %}{{ messages[0].role }}",
    "{% set ns = namespace(x=1) %}{% set ns.x = ns %}{{ ns }}", "{% set ns = namespace(x=[]) %}{% set ns.x = ns.x + [1] %}{% set ns.x = ns.x + [2] %}{{ ns.x }}", "{% if true %}{% set x = 1 %}{% endif %}{{ x }}", "{% if false %}{% set x = 1 %}{% endif %}{{ x is defined }}",
    "{% set x = 1 %}{% if true %}{% set x = 2 %}{% endif %}{{ x }}", "{% set a = b = 1 %}", "{% set 1 = 2 %}", "{% set x = 1 %", "{% set dict = {'a': 5} %}{{ dict.a }}", "{{ dict(a=1) }}{% set range = 3 %}{{ range }}",
    "{% macro m() %}x{% endmacro %}{{ m() }}{{ m() }}", "{% macro m(a, b=2) %}{{ a }}{{ b }}{% endmacro %}{{ m(1) }}{{ m(1, 3) }}{{ m(b=4, a=5) }}{{ m() }}", "{% macro m(a) %}{{ a is defined }}{% endmacro %}{{ m() }}", "{% macro m(a) %}{% endmacro %}{{ m(1, 2) }}", "{% macro m(a) %}{% endmacro %}{{ m(b=1) }}",
    "{% macro m(a, b=a) %}{{ b }}{% endmacro %}{{ m(1) }}", "{% macro m(a=1, b) %}{% endmacro %}", "{% macro m() %}{{ varargs }}{{ kwargs }}{% endmacro %}{{ m(1, 2, x=3) }}", "{% macro m(a) %}{{ varargs }}{% endmacro %}{{ m(1, 2, 3) }}", "{% macro m() %}{{ caller }}{% endmacro %}{{ m() }}",
    "{% macro m() %}[{{ caller() }}]{% endmacro %}{% call m() %}in{% endcall %}", "{% macro m() %}[{{ caller(1, 2) }}]{% endmacro %}{% call(a, b) m() %}{{ a }}{{ b }}{% endcall %}", "{% macro m() %}x{% endmacro %}{% call m() %}in{% endcall %}", "{% macro m(x) %}{{ caller(x) }}{% endmacro %}{% set y = 5 %}{% call(z) m(1) %}{{ y }}{{ z }}{% endcall %}",
    "{% call word %}{% endcall %}", "{% macro m(n) %}{{ n }}{% if n > 0 %}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(3) }}", "{% macro a() %}{{ b() }}{% endmacro %}{% macro b() %}B{% endmacro %}{{ a() }}", "{% set x = 1 %}{% macro m() %}{{ x }}{% endmacro %}{% set x = 2 %}{{ m() }}", "{% macro m() %}{% set x = 1 %}{% endmacro %}{{ m() }}{{ x }}",
    "{% for x in numbers %}{% macro m() %}{{ x }}{% endmacro %}{{ m() }}{% endfor %}", "{% macro m() %}{{ x }}{% endmacro %}{% for x in numbers %}{{ m() }}{% endfor %}", "{% macro m() %} a {% endmacro %}{{ m() | trim }}|{{ m() | length }}", "{% macro m() %}x{% endmacro %}{{ m }}{{ m.name }}", "{% macro m(x) %}{{ x | join(',') }}{% endmacro %}{{ m(*[[1, 2]]) }}{{ m(**{'x': [3]}) }}",
    "{% macro m(a, b) %}{{ a }}{{ b }}{% endmacro %}{{ m(*[1, 2]) }}{{ m(1, *[2]) }}{{ m(*[1], b=2) }}", "{{ m() }}{% macro m() %}x{% endmacro %}", "{% macro m() -%}\n  x\n{%- endmacro %}[{{ m() }}]", "{% macro outer() %}{% macro inner() %}i{% endmacro %}{{ inner() }}{% endmacro %}{{ outer() }}{{ inner is defined }}",
    "{% filter upper %}abc{{ word }}{% endfilter %}", "{% filter trim | upper %}  a {% endfilter %}|", "{% filter replace('a', 'b') %}aa{% endfilter %}", "{% filter nothing %}{% endfilter %}",
    "{% with %}{% set x = 1 %}{{ x }}{% endwith %}{{ x }}", "{% with a = 1, b = 2 %}{{ a }}{{ b }}{% endwith %}{{ a }}", "{% set a = 1 %}{% with a = 2, b = a %}{{ a }}{{ b }}{% endwith %}{{ a }}", "{% with a %}{% endwith %}", "{% with a, b = 1 %}{% endwith %}",
    "{% raw %}{{ x }}{% if %}{# #}{% endraw %}", "{% raw %}\n  a\n{% endraw %}\nb", "{%- raw -%}\n  a\n{%- endraw -%}\nb", "a {% raw %} b {% endraw %} c", "{% raw %}x", "{% raw %}{%  endraw  %}", "  {% raw %}\n  x\n  {% endraw %}\n  y", "{% raw +%}x{% endraw %}",
    "{% generation %}a{{ word }}{% endgeneration %}b", "{% for m in messages %}{%- generation -%}\n {{ m.role }} {% set x = 1 %}\n{%- endgeneration %}\n{% endfor %}{{ x is defined }}", "{% generation %}", "{% set x = 1 %}{% generation %}{{ x }}{% endgeneration %}",
    "{% for x in numbers %}{% generation %}{{ x }}{{ loop.index }}{% endgeneration %}{% endfor %}", "{% print 1, 'a' %}", "{% do 1 %}", "{% include 'x' %}", "{% extends 'x' %}", "{% import 'x' as y %}", "{% autoescape true %}x",
    "{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}{{ c.next() }}{{ c.current }}{{ c.reset() }}{{ c.current }}", "{% set j = joiner() %}{% for x in numbers %}{{ j() }}{{ x }}{% endfor %}",
    "{% set it = numbers | map('string') %}{{ it | list }}{{ it | list }}", "{% set it = numbers | select %}{{ it | first }}{{ it | list }}", "{% set it = numbers | select %}{{ 1 in it }}{{ it | list }}", "{% set a = [1] %}{% set b = a %}{{ a is sameas b }}",
    "{{ messages | map(attribute='role') | list | tojson }}\n{%- for m in messages -%}\n{{ m['role'] }}: {{ m.content | default('', true) }}\n{%- endfor -%}", "{{- bos_token -}}\n{%- if tools -%}\n{%- for t in tools -%}{{ t | tojson(indent=2) }}{%- endfor -%}\n{%- endif -%}",
    "{% for m in messages %}{% if loop.first and m.role == 'system' %}{% set system = m.content %}{% endif %}{% endfor %}[{{ system }}]", "{% set ns = namespace(last=-1) %}{% for m in messages[::-1] %}{% set i = (messages | length - 1) - loop.index0 %}{% if ns.last < 0 and m.role == 'user' %}{% set ns.last = i %}{% endif %}{% endfor %}{{ ns.last }}",
    "{%- macro render(v, n=0) -%}{%- if v is mapping -%}{%- for k, x in v.items() -%}{{ '\\n' ~ '  ' * n ~ k }}:{{ render(x, n + 1) }}{%- endfor -%}{%- elif v is string -%}{{ v }}{%- elif v is iterable -%}{%- for x in v -%}[{{ render(x, n + 1) }}]{%- endfor -%}{%- else -%}{{ v }}{%- endif -%}{%- endmacro -%}{{ render(tools[0]) }}",
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}{% set system_message = false %}{% endif %}{% for message in loop_messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate') }}{% endif %}{{ message.role }}{% endfor %}",
    "{{ 'a' if 1 == 1 }}{{ 'b' if 1 == 2 }}|", "{{ numbers[0] }}{{ numbers [1] }}{{ dict . a }}", "{{ [\n1,\n2\n] }}", "{{\n1\n}}", "{%\nif true\n%}x{%\nendif\n%}", "{{ '{% if %}' }}", "{{ \"{{ x }}\" }}", "a{%- set x = 1 -%}b", "{{ 1 }}{%- set x = 1 %}\n\n{{ 2 }}",
    "{% if word is defined %}d{% endif %}{% if word is not defined %}n{% endif %}", "{% if not missing is defined %}d{% endif %}", "{% if 'a' not in dict and 'b' in dict %}x{% else %}y{% endif %}", "{% if word == 'word' and (zero or one) %}x{% endif %}", "é{{ '日' }}😀{% if true %}ü{% endif %}",
]  # fmt: skip


def render(template: str) -> dict:
    """`text`, or `raised` with the message of `raise_exception`, or `error`."""
    try:
        return {"text": _compile_jinja_template(template).render(**CONTEXT)}
    except TemplateError as error:
        # What `raise_exception` raises is of exactly this class.
        return {"raised": str(error)} if type(error) is TemplateError else {"error": str(error)[:100]}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:100]}


def main():
    out = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parent.parent / "fixtures/templates/cases.json")
    templates = ["{{ " + expression + " }}" for expression in EXPRESSIONS] + TEMPLATES
    cases = [{"template": template} | render(template) for template in dict.fromkeys(templates)]
    # Addresses of objects differ from run to run.
    cases = [case for case in cases if " at 0x" not in case.get("text", "") + case.get("raised", "")]
    out.parent.mkdir(exist_ok=True)
    lines = ",\n".join("  " + json.dumps(case, ensure_ascii=False) for case in cases)
    out.write_text('{\n "context": ' + json.dumps(CONTEXT, ensure_ascii=False) + ',\n "cases": [\n' + lines + "\n ]\n}\n", encoding="utf-8")
    print(f"{len(cases)} templates, {sum('error' in case for case in cases)} of them errors")


main()
