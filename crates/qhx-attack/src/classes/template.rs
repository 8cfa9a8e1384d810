//! Chat templates: programs of strangers. Some are real ones that were changed, some are written by a grammar that knows where interpreters hurt.

use super::{Bench, Case, Outcome, bundle};
use crate::{mutate::mutate_bytes, random::Random, seeds::Seeds};
use qhx_attack::probes;

const FILE: &str = "chat_template.jinja";

pub(super) fn make(seeds: &Seeds, random: &mut Random) -> Case {
    // The first bundle has a template of its own, in whose place this one stands.
    let mut files = seeds.bundles[0].clone();
    files.insert(FILE.to_owned(), hostile(seeds, random).into_bytes());
    bundle::rehash(&mut files);
    Case { files, ..Case::default() }.command("generate {case} --user Hello --max-new 1 --json")
}

/// A template that means no good.
pub(super) fn hostile(seeds: &Seeds, random: &mut Random) -> String {
    match random.below(4) {
        0 => {
            let mut bytes = random.pick(&seeds.templates).clone().into_bytes();
            let other = random.pick(&seeds.templates).clone();
            mutate_bytes(&mut bytes, usize::MAX, other.as_bytes(), random);
            String::from_utf8_lossy(&bytes).into_owned()
        }
        // Within a real template, where variables are set and loops run.
        1 => {
            let real = random.pick(&seeds.templates);
            let at = real.match_indices("%}").nth(random.below(12)).map_or(real.len(), |(at, _)| at + 2);
            format!("{}{}{}", &real[..at], Writer { random }.statements(2), &real[at..])
        }
        2 => idiom(random),
        _ => Writer { random }.statements(4),
    }
}

/// Shapes that have hurt interpreters, at random sizes.
fn idiom(random: &mut Random) -> String {
    let (n, many) = (random.length(40_000), random.length(4_000_000_000));
    let x = random.word(&["x", "messages", "'ab'", "[1]", "ns", "{}"]);
    let filter = random.word(&["string", "upper", "join", "tojson", "length", "list", "sort", "trim", "first", "pprint", "e"]);
    match random.below(24) {
        0 => format!("{{% set ns = namespace() %}}{{% set ns.a = ns %}}{{{{ ns|{filter} }}}}"),
        1 => format!("{{% set ns = namespace(l=[]) %}}{{% set ns.l = [ns] %}}{{{{ ns.l == [ns] }}}}{{{{ ns.l|{filter} }}}}"),
        2 => format!(
            "{{% set ns = namespace(s='x') %}}{{% for i in range({}) %}}{{% set ns.s = ns.s ~ ns.s %}}{{% endfor %}}{{{{ ns.s|{filter} }}}}",
            random.length(200)
        ),
        3 => format!(
            "{{% set ns = namespace(l=[1]) %}}{{% for i in range({}) %}}{{% set ns.l = ns.l + ns.l %}}{{% endfor %}}{{{{ ns.l|length }}}}",
            random.length(200)
        ),
        4 => format!(
            "{{% set ns = namespace(l=[]) %}}{{% for i in range({n}) %}}{{% set ns.l = [ns.l] %}}{{% endfor %}}{{{{ ns.l|{filter} }}}}"
        ),
        5 => format!("{{{{ 'x'|indent({many}) }}}}{{{{ 'a\nb'|indent({many}, true) }}}}"),
        6 => format!("{{{{ {x} * {many} }}}}"),
        7 => format!("{{{{ {}1{} }}}}", "(".repeat(n), ")".repeat(n)),
        8 => format!(
            "{{{{ 1{} }}}}",
            random.word(&[" + 1", " ~ 1", "|abs", ".a", "[0]", " and 1", " if 1", " is defined", "()"]).repeat(n).as_str()
        ),
        9 => format!("{{{{ {}1 }}}}", random.word(&["-", "not ", "["]).repeat(n)),
        10 => format!("{}x{}", "{% if 1 %}".repeat(n), "{% endif %}".repeat(n)),
        11 => format!("{}x{}", "{% for i in [1,2] %}".repeat(n.min(500)), "{% endfor %}".repeat(n.min(500))),
        12 => format!("{{% for i in range({many}) %}}{{{{ i }}}}{{% endfor %}}"),
        13 => "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}".to_owned(),
        14 => "{% for x in messages recursive %}{{ loop(messages) }}{% endfor %}".to_owned(),
        15 => format!("{{{{ '{}'|replace('', 'x' * {}) }}}}", "a".repeat(n), random.length(100_000)),
        16 => format!("{{{{ '%{many}d'|format(1) }}}}{{{{ '%.{many}f' % 1.5 }}}}"),
        17 => format!("{{{{ messages[{many}:-{many}:-{n}] }}}}{{{{ 'abc'[::{many}] }}}}{{{{ 'abc'[::0] }}}}"),
        18 => format!("{{{{ raise_exception('{}' ~ messages) }}}}", "boom\u{1b}[2J".repeat(n.min(5000))),
        19 => format!(
            "{{{{ messages|tojson(indent={many}) }}}}{{{{ 'a,b'.split(',', {many}) }}}}{{{{ 'a'.center({many}) }}}}{{{{ 'a'.ljust({many}) }}}}"
        ),
        20 => format!("{{{{ strftime_now('{}') }}}}", random.word(&["%Y", "%", "%Q%q%-", "%999999999Y", "%d"]).repeat(n.min(3000))),
        21 => "{% include 'x' %}{% extends messages %}{% import 'a' as b %}{% block c %}{{ super() }}{% endblock %}".to_owned(),
        22 => format!(
            "{{{{ {many} ** {many} }}}}{{{{ 9223372036854775807 + {many} }}}}{{{{ -9223372036854775808 // -1 }}}}{{{{ 1 % 0 }}}}{{{{ {many} * -{many} * {many} }}}}"
        ),
        _ => format!(
            "{{% set ns = namespace(d={{}}) %}}{{% for i in range({}) %}}{{% set ns.d = {{'a': ns.d, 'b': ns.d}} %}}{{% endfor %}}{{{{ ns.d|{filter} }}}}",
            random.length(300)
        ),
    }
}

/// Writes templates by their grammar.
struct Writer<'r> {
    random: &'r mut Random,
}

impl Writer<'_> {
    fn statements(&mut self, depth: usize) -> String {
        (0..1 + self.random.below(4)).map(|_| self.statement(depth)).collect()
    }

    fn statement(&mut self, depth: usize) -> String {
        let inside = |writer: &mut Self| if depth == 0 { "x".to_owned() } else { writer.statements(depth - 1) };
        let trim = self.random.word(&["", "-", "+"]);
        match self.random.below(11) {
            0 => format!("{{%{trim} for m in {} %}}{}{{%{trim} else %}}{}{{% endfor %}}", self.expression(2), inside(self), inside(self)),
            1 => format!(
                "{{%{trim} if {} %}}{}{{% elif {} %}}{}{{% endif %}}",
                self.expression(2),
                inside(self),
                self.expression(1),
                inside(self)
            ),
            2 => format!("{{% set {} = {} {trim}%}}", self.name(), self.expression(3)),
            3 => format!("{{% set ns = namespace({}={}) %}}", self.name(), self.expression(2)),
            4 => format!("{{% set ns.{} = {} %}}", self.name(), self.expression(2)),
            5 => format!(
                "{{% macro f({}, y={}) %}}{}{{% endmacro %}}{{{{ f({}) }}}}",
                self.name(),
                self.expression(1),
                inside(self),
                self.expression(1)
            ),
            6 => format!("{{% filter {} %}}{}{{% endfilter %}}", self.filter(), inside(self)),
            7 => format!("{{% set x %}}{}{{% endset %}}", inside(self)),
            8 => format!("{{% with x = {} %}}{}{{% endwith %}}", self.expression(2), inside(self)),
            9 => (self.random.word(&[
                "{% break %}",
                "{% continue %}",
                "{# a #}",
                "{% generation %}",
                "{% endif %}",
                "text ",
                "<|im_start|>",
            ]))
            .to_owned(),
            _ => format!("{{{{{trim} {} {trim}}}}}", self.expression(4)),
        }
    }

    fn expression(&mut self, depth: usize) -> String {
        if depth == 0 {
            return self.atom();
        }
        let depth = depth - 1;
        match self.random.below(12) {
            0 => format!("{} {} {}", self.expression(depth), self.operator(), self.expression(depth)),
            1 => format!("{}|{}", self.expression(depth), self.filter()),
            2 => format!("{}[{}]", self.expression(depth), self.expression(depth)),
            3 => format!("{}[{}:{}:{}]", self.expression(depth), self.atom(), self.atom(), self.atom()),
            4 => format!("{}.{}", self.expression(depth), self.name()),
            5 => format!("{}.{}({})", self.expression(depth), self.method(), self.expression(depth)),
            6 => format!("[{}, {}]", self.expression(depth), self.expression(depth)),
            7 => format!("{{'a': {}, {}: {}}}", self.expression(depth), self.atom(), self.expression(depth)),
            8 => format!("({} if {} else {})", self.expression(depth), self.expression(depth), self.expression(depth)),
            9 => format!("{} is {} {}", self.expression(depth), self.random.word(&["not", ""]), self.test()),
            10 => format!(
                "{}({})",
                self.random.word(&["range", "dict", "namespace", "cycler", "joiner", "lipsum", "raise_exception", "loop", "f"]),
                self.expression(depth)
            ),
            _ => self.atom(),
        }
    }

    fn atom(&mut self) -> String {
        let atoms = [
            "0",
            "1",
            "-1",
            "3.5",
            "1e308",
            "9223372036854775807",
            "-9223372036854775808",
            "18446744073709551616",
            "true",
            "none",
            "''",
            "'é👩‍👧'",
            "'a\\nb'",
            "messages",
            "messages[0]",
            "messages[-1].content",
            "tools",
            "bos_token",
            "loop.index0",
            "loop",
            "ns",
            "x",
            "undefined_name",
            "[]",
            "{}",
            "self",
            "m.role",
            "add_generation_prompt",
            "varargs",
            "caller",
        ];
        self.random.word(&atoms).to_owned()
    }

    fn operator(&mut self) -> &'static str {
        self.random.word(&["+", "-", "*", "/", "//", "%", "**", "~", "==", "!=", "<", ">=", "and", "or", "in", "not in"])
    }

    fn name(&mut self) -> &'static str {
        self.random.word(&["x", "role", "content", "a", "__class__", "items", "m", "namespace", "loop"])
    }

    fn test(&mut self) -> &'static str {
        self.random.word(&[
            "defined",
            "none",
            "string",
            "mapping",
            "iterable",
            "sequence",
            "number",
            "odd",
            "divisibleby(0)",
            "sameas(x)",
            "in(x)",
            "callable",
        ])
    }

    fn method(&mut self) -> &'static str {
        self.random.word(&[
            "split",
            "strip",
            "replace",
            "startswith",
            "items",
            "keys",
            "get",
            "append",
            "update",
            "format",
            "join",
            "encode",
            "zfill",
            "count",
            "title",
            "__init__",
        ])
    }

    fn filter(&mut self) -> String {
        let filters = [
            "trim",
            "tojson",
            "length",
            "upper",
            "join(',')",
            "first",
            "last",
            "list",
            "string",
            "int",
            "float",
            "abs",
            "default('x')",
            "replace('a', 'bb')",
            "items",
            "dictsort",
            "sort",
            "reverse",
            "unique",
            "map('upper')",
            "map(attribute='role')",
            "selectattr('role')",
            "rejectattr('role', 'equalto', 'user')",
            "batch(3)",
            "slice(0)",
            "batch(0)",
            "indent(8)",
            "round(400)",
            "truncate(2)",
            "sum",
            "min",
            "max",
            "groupby('role')",
            "urlencode",
            "escape",
            "safe",
            "wordwrap(0)",
            "format(1, 2)",
            "split(',')",
            "bool",
            "select",
            "attr('x')",
            "center(30)",
            "random",
            "xmlattr",
            "filesizeformat",
            "tojson(indent=4)",
            "nofilter",
        ];
        self.random.word(&filters).to_owned()
    }
}

pub(super) fn attempt(case: &Case, _: &Bench) -> Outcome {
    probes::template(case.file(FILE))
}
