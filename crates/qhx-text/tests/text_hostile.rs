//! Templates that were written to do harm: each ends soon, by itself, in little memory and on a small stack.

use qhx_text::{Chat, ChatError, ChatTemplate, Message};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// Counts what is allocated, to know the most that ever was at once.
struct Counting;

static NOW: AtomicUsize = AtomicUsize::new(0);
static MOST: AtomicUsize = AtomicUsize::new(0);

#[global_allocator]
static ALLOCATOR: Counting = Counting;

// SAFETY: all work is the system allocator's; the rest only counts.
#[allow(unsafe_code)]
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        MOST.fetch_max(NOW.fetch_add(layout.size(), Relaxed) + layout.size(), Relaxed);
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        NOW.fetch_sub(layout.size(), Relaxed);
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(pointer, layout) }
    }
}

/// Most memory for one template. It is the limit of what a render may have at once, and twice as much for growing it.
const MOST_BYTES: usize = 300 << 20;
/// Longest time for one template. None takes much more than a second.
const PATIENCE: Duration = Duration::from_secs(4);
/// Smaller than the stack of any thread that renders.
const STACK_BYTES: usize = 1 << 20;

/// How long this thread has computed; how long it has been, where the system does not say.
fn computed() -> Duration {
    static STARTED: LazyLock<Instant> = LazyLock::new(Instant::now);
    let spent = std::fs::read_to_string("/proc/thread-self/schedstat").ok();
    let nanoseconds = spent.and_then(|spent| spent.split(' ').next()?.parse().ok());
    nanoseconds.map_or_else(|| STARTED.elapsed(), Duration::from_nanos)
}

fn chat(messages: usize) -> Chat {
    Chat::new(vec![Message::new("user", "x"); messages])
}

fn render(source: &str, messages: usize) -> Result<String, ChatError> {
    ChatTemplate::new(source, []).and_then(|template| template.render(&chat(messages)))
}

/// Renders each template for one message.
fn bounded(templates: Vec<(String, String)>) -> Vec<(String, Result<String, ChatError>)> {
    bounded_for(1, templates)
}

/// Renders each template for so many messages and gives what came of it; those that were too slow or too large are named.
fn bounded_for(messages: usize, templates: Vec<(String, String)>) -> Vec<(String, Result<String, ChatError>)> {
    let work = move || {
        let run = |(name, source): (String, String)| {
            let before = NOW.load(Relaxed);
            MOST.store(before, Relaxed);
            let started = computed();
            let rendered = render(&source, messages);
            let (took, most) = (computed() - started, MOST.load(Relaxed).saturating_sub(before));
            assert!(took < PATIENCE, "{name} took {took:?}");
            assert!(most < MOST_BYTES, "{name} took {most} bytes");
            (name, rendered)
        };
        templates.into_iter().map(run).collect()
    };
    let thread = std::thread::Builder::new().stack_size(STACK_BYTES).spawn(work).expect("a thread");
    thread.join().expect("no template is too slow or too large")
}

fn named(templates: &[&str]) -> Vec<(String, String)> {
    templates.iter().map(|source| (source.to_string(), source.to_string())).collect()
}

/// All must reach a limit or fail.
fn refused(templates: Vec<(String, String)>) {
    for (name, rendered) in bounded(templates) {
        assert!(
            matches!(rendered, Err(ChatError::Endless { .. } | ChatError::Render { .. } | ChatError::Template { .. })),
            "{name}: {rendered:?}"
        );
    }
}

#[test]
fn hostile_templates_end_soon_in_little_memory_on_a_small_stack() {
    values_that_contain_themselves();
    chains_of_any_length();
    endless_nesting();
    endless_work();
    endless_growth();
    endless_formats();
    slow_operations();
    large_sources();
    long_conversations();
}

/// With as much as any conversation is granted.
fn long_conversations() {
    let growing = |made: &str| {
        format!("{{% set ns = namespace(x=[]) %}}{{% for i in range(100000) %}}{{% set ns.x = ns.x + [{made}] %}}{{% endfor %}}")
    };
    let templates = [
        "{% for a in messages %}{% for b in range(100000) %}{{ '' }}{% endfor %}{% endfor %}".to_owned(),
        "{% set x = 'ß' * 1000000 %}{% for i in range(100000) %}{% set y = x | title %}{% endfor %}".to_owned(),
        "{% set ns = namespace(x=(1,)) %}{% for i in range(100) %}{% set ns.x = (ns.x, ns.x) %}{% endfor %}{{ {ns.x: 1} }}".to_owned(),
        "{% set ns = namespace(x='a' * 1000000) %}{% for i in range(100000) %}{% set ns.x = ns.x ~ 'a' %}{% endfor %}".to_owned(),
        growing("namespace(x=i)"),
        growing("messages.x"),
    ];
    for (name, rendered) in bounded_for(2_001, templates.into_iter().map(|source| (source.clone(), source)).collect()) {
        assert!(matches!(rendered, Err(ChatError::Endless { .. })), "{name}: {rendered:?}");
    }
}

/// As in Python, a namespace that contains itself can be printed.
fn values_that_contain_themselves() {
    let own = "{% set ns = namespace() %}{% set ns.x = ns %}";
    let printed = "<Namespace {'x': <Namespace {...}>}>";
    let cases = [
        ("{{ ns | string }}", Some(printed)),
        ("{{ ns | upper | lower | length }}", Some("36")),
        ("{{ [ns] | join }}", Some(printed)),
        ("{{ ns == ns }}{{ [ns] == [ns] }}{{ ns in [ns] }}", Some("TrueTrueTrue")),
        ("{{ '{}'.format(ns) }}", Some(printed)),
        ("{{ '%s' % ns }}", Some(printed)),
        ("{{ {ns: 1}[ns] }}{{ [ns, ns] | unique | list | length }}", Some("11")),
        ("{{ [ns, ns] | sort | length }}", Some("2")),
        ("{{ ns < ns }}", None),
        ("{{ ns | tojson }}", None),
        ("{{ ns | length }}", None),
    ];
    let templates = cases.iter().map(|(source, _)| (source.to_string(), format!("{own}{source}"))).collect();
    for ((name, rendered), (_, expected)) in bounded(templates).into_iter().zip(cases) {
        assert_eq!(rendered.as_deref().ok(), expected, "{name}");
    }
    let raised = bounded(named(&[&format!("{own}{{{{ raise_exception(ns) }}}}")]));
    assert_eq!(raised[0].1, Err(ChatError::Refused { message: printed.to_owned() }));
}

/// Twenty thousand links are no nesting: they are evaluated, or fail for what they are.
fn chains_of_any_length() {
    let long = |start: &str, link: &str, end: &str, expected: Option<&str>| {
        (format!("{start}{link}…{end}"), format!("{start}{}{end}", link.repeat(20_000)), expected.map(str::to_owned))
    };
    let cases = [
        long("{{ 1", "+1", " }}", Some("20001")),
        long("{{ 1", "**1", " }}", Some("1")),
        long("{{ ('' ", "~''", ") | length }}", Some("0")),
        long("{{ ('' ", "'a'", ") | length }}", Some("20000")),
        long("{{ (0", ",0", ") | length }}", Some("20001")),
        long("{{ 0", " <= 0", " }}", Some("True")),
        long("{{ 1", " and 1", " }}", Some("1")),
        long("{{ 0", " or 0", " }}", Some("0")),
        long("{{ ", "not ", "1 }}", Some("True")),
        long("{{ ", "-", "1 }}", Some("1")),
        long("{{ 0", " if 0 else 0", " }}", Some("0")),
        long("{{ 0", " if 1", " }}", None),
        long("{{ 'x'", "|upper", " }}", Some("X")),
        long("{{ 'x'", "[:]", " }}", Some("x")),
        long("{{ 'x'", ".upper()", " }}", Some("X")),
        long("{{ messages", ".b", " }}", None),
        long("{{ messages", "[0]", " }}", None),
        long("{{ range", "()", " }}", None),
        long("{{ 1", " is defined and 1", " }}", Some("1")),
        long("{{ 'a'|map(", "'map',", "'upper')|list }}", None),
        long("{{ '{0", ".a", "}'.format(1) }}", None),
        long("{{ messages|map(attribute='a", ".a", "')|list }}", None),
        long("{% if 0 %}", "{% elif 0 %}", "{% else %}e{% endif %}", Some("e")),
    ];
    let templates = cases.iter().map(|(name, source, _)| (name.clone(), source.clone())).collect();
    for ((name, rendered), (.., expected)) in bounded(templates).into_iter().zip(cases) {
        assert_eq!(rendered.ok(), expected, "{name}");
    }
}

fn endless_nesting() {
    let around = |open: &str, inside: &str, close: &str, times: usize| {
        (format!("{open}…{close} {times} times"), format!("{}{inside}{}", open.repeat(times), close.repeat(times)))
    };
    let printed = |open: &str, close: &str| {
        let (name, source) = around(open, "1", close, 20_000);
        (name, format!("{{{{ {source} }}}}"))
    };
    let mut templates = vec![
        printed("(", ")"),
        printed("[", "]"),
        printed("{1:", "}"),
        printed("x[", "]"),
        printed("range(", ")"),
        printed("1|d(", ")"),
        printed("1 is in(", ")"),
        printed("(", " <= 0)"),
        around("{% if true %}", "", "{% endif %}", 20_000),
        around("{% for x in [1] %}", "", "{% endfor %}", 20_000),
        around("{% for x in [1] %}", "", "", 20_000),
        around("{% macro m() %}", "", "{% endmacro %}", 20_000),
        around("{% set x %}", "", "{% endset %}", 20_000),
        around("{% generation %}", "", "{% endgeneration %}", 20_000),
    ];
    // Macros that call themselves, from as deep inside as they can.
    for (open, close) in [
        ("{{ [", "] }}"),
        ("{% set x %}{{ ", " }}{% endset %}"),
        ("{% filter upper %}{{ ", " }}{% endfilter %}"),
        ("{% for x in [1] %}{{ ", " }}{% endfor %}"),
        ("{% call m() %}{{ ", " }}{% endcall %}"),
    ] {
        templates.push((format!("{open}m(){close}"), format!("{{% macro m() %}}{open}m(){close}{{% endmacro %}}{{{{ m() }}}}")));
    }
    for (open, close, times) in [("[", "]", 90), ("[1 ~ [0 or ", "]]", 45), ("1|d(not 1|d(-", "))", 45)] {
        let inside = around(open, "m()", close, times).1;
        templates.push((format!("m within {open}"), format!("{{% macro m() %}}{{{{ {inside} }}}}{{% endmacro %}}{{{{ m() }}}}")));
    }
    let blocks = around("{% for x in [1] %}{% if 1 %}", "{{ m() }}", "{% endif %}{% endfor %}", 45).1;
    templates.push(("m within blocks".into(), format!("{{% macro m() %}}{blocks}{{% endmacro %}}{{{{ m() }}}}")));
    templates.extend(named(&[
        "{% macro m(a=m()) %}{% endmacro %}{{ m() }}",
        "{% macro m() %}{% call m() %}{{ caller() }}{% endcall %}{% endmacro %}{{ m() }}",
        "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
        "{% set ns = namespace(x=[]) %}{% for i in range(100000) %}{% set ns.x = [ns.x] %}{% endfor %}",
        "{% set ns = namespace(x={}) %}{% for i in range(100000) %}{% set ns.x = {1: ns.x} %}{% endfor %}",
        "{% set ns = namespace(x=0) %}{% for i in range(5000) %}{% set ns.x = namespace(x=ns.x) %}{% endfor %}{{ ns }}",
        "{% set ns = namespace(x=0) %}{% for i in range(5000) %}{% set ns.x = namespace(x=[ns.x]) %}{% endfor %}{{ ns.x == ns.x }}{{ ns }}",
    ]));
    refused(templates);
}

fn endless_work() {
    let pairs = "{% set ns = namespace(x=[1], y=[1]) %}{% for i in range(100) %}{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}{% endfor %}";
    let mut templates: Vec<(String, String)> =
        ["ns.x", "ns.x == ns.y", "ns.x < ns.y", "ns.x | tojson", "[ns.x, ns.y] | sort", "ns.x in [ns.y]", "ns.x | string | length"]
            .into_iter()
            .map(|expression| (expression.to_owned(), format!("{pairs}{{{{ {expression} }}}}")))
            .collect();
    templates.extend(named(&[
        "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
        "{% for a in range(100000) %}{% for b in range(100000) %}{{ '' }}{% endfor %}{% endfor %}",
        "{% for a in range(100000) %}{% for b in 'abc' %}{% set x = [a, b, {a: b}] %}{% endfor %}{% endfor %}",
        "{% for a in range(100000) %}{% set c = cycler(1) %}{% set n = namespace(a=1) %}{% set m = [1] | map('string') %}{% endfor %}",
        "{% for a in range(100000) %}{% macro m() %}{{ a }}{% endmacro %}{% set x = [m, m, m] %}{{ m() }}{% endfor %}",
        "{% for a in range(100000) %}{% with b=1 %}{% with c=2 %}{% with d=3 %}{% set e = [b, c, d] %}{% endwith %}{% endwith %}{% endwith %}{% endfor %}",
        "{% set ns = namespace(x=(1,)) %}{% for i in range(100) %}{% set ns.x = (ns.x, ns.x) %}{% endfor %}{{ {ns.x: 1} }}",
    ]));
    refused(templates);
}

fn endless_growth() {
    refused(named(&[
        "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(100) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(100) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set ns = namespace(x=[1]) %}{% for i in range(100) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace(x='a') %}{% for i in range(100) %}{% set ns.x = ns.x | replace('a', 'aaaaaaaaaa') %}{% endfor %}",
        "{% set ns = namespace(x='') %}{% for i in range(100) %}{% set ns.x = [ns.x, ns.x] | string %}{% endfor %}",
        "{% set ns = namespace(x='<') %}{% for i in range(100) %}{% set ns.x = (ns.x | escape) ~ ns.x %}{% endfor %}",
        "{{ ('a' * 1000000).replace('', 'b' * 1000000) }}",
        "{{ 'x' * 10**9 }}",
        "{{ 'x' * 10**18 * 10**18 }}",
        "{{ [1] * 10**12 }}",
        "{{ range(10**12) | list }}",
        "{% set l = [[1] * 1000] * 1000 %}{{ l | sum(start=[]) }}",
        "{{ 'a\nb' | indent(4000000000) }}",
        "{{ ('a\n' * 100000) | indent(100000) }}",
        "{{ [1] | batch(10**12, 'x') | list }}",
        "{{ [1] | slice(10**12, 'x') | list }}",
        "{{ (['x' * 1000000] * 100000) | join }}",
        "{{ (['x'] * 100000) | join('y' * 1000000) }}",
        "{{ ''.join(['x' * 1000000] * 100000) }}",
        "{% set x = 'x' * 10000000 %}{{ [x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x] }}",
        "{{ [[1, 2], [3]] | tojson(indent=10**10) }}",
        "{{ ([1] * 100000) | tojson(separators=('x' * 1000000, ':')) }}",
        "{% for a in range(100000) %}{{ 'abcdefgh' * 10000 }}{% endfor %}",
        "{{ strftime_now('%A' * 10000000) }}",
        "{{ ('ü' * 10000000) | urlencode }}",
        "{{ ['\\x00' * 10000000] }}",
        "{{ 10 ** 10 ** 10 }}",
    ]));
    assert_eq!(render("{{ ('' * 10**18) ~ ([] * 10**18) ~ 1 ** 10**18 }}", 1).unwrap(), "[]1");
}

fn endless_formats() {
    refused(named(&[
        "{{ 'a'.center(10**10) }}",
        "{{ 'a'.ljust(10**10) }}",
        "{{ 'a'.rjust(10**30) }}",
        "{{ 'a'.zfill(10**10) }}",
        "{{ '\t\t'.expandtabs(10**10) }}",
        "{{ 'a' | center(10**12) }}",
        "{{ '{:>1000000000}'.format(1) }}",
        "{{ '{:>99999999999999999999999}'.format(1) }}",
        "{{ '{:.1000000000f}'.format(1.5) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%.1000000000d' % 1 }}",
        "{{ '%.99999f' % 1.5 }}",
        "{{ '%*s' % (10**12, 1) }}",
        "{{ '%1000000000s' | format(1) }}",
    ]));
}

/// Operations that look at much for one step of the template: each is repeated far more often than a second allows.
fn slow_operations() {
    let repeated = |value: &str, operation: &str| {
        let source = format!("{{% set x = {value} %}}{{% for i in range(100000) %}}{{% set y = {operation} %}}{{% endfor %}}");
        (operation.to_owned(), source)
    };
    let text = "'a' * 1000000";
    refused(vec![
        repeated(text, "x.count('aaaab')"),
        repeated(text, "('a' * 1000 ~ 'b') in x"),
        repeated(text, "x == 'a' * 1000000"),
        repeated(text, "x in {'a': 1}"),
        repeated(text, "x | length"),
        repeated(text, "x.strip('bcd' * 100)"),
        repeated(text, "x | int"),
        repeated(text, "x | wordcount"),
        repeated(text, "x.split('b')"),
        repeated("'1' * 1000000", "x | float"),
        repeated("'ä' * 1000000", "x[999999]"),
        repeated("'ß' * 1000000", "x | upper"),
        repeated("'ß' * 1000000", "x | title"),
        repeated("'a ' * 1000000", "x.split()"),
        repeated("'a\\n' * 1000000", "x.splitlines()"),
        repeated("range(100000) | list", "x | sort(reverse=true)"),
        repeated("range(100000) | list", "x[1:]"),
        repeated("range(100000) | list", "-1 in x"),
        repeated("range(100000) | list", "x | map('string') | unique | list"),
        repeated("range(100000) | list", "x | map('string') | list | groupby(0)"),
        repeated("1.5e300", "x | round(400)"),
        repeated("1.5e300", "'%.1200f' % x"),
    ]);
}

fn large_sources() {
    let of = |count: usize, piece: &dyn Fn(usize) -> String| (0..count).map(piece).collect::<String>();
    let parameters = of(30_000, &|n| format!("x{n},"));
    let arguments = of(30_000, &|n| format!("x{}=1,", 29_999 - n));
    let megabyte = of(130_000, &|n| format!("x{n},"));
    let name = ".a".repeat(500_000);
    let templates = vec![
        ("a megabyte of text", "x".repeat(1 << 20)),
        ("many tags", "{{1}}".repeat(200_000)),
        ("many lists", "{{[[],[],[],[],[],[],[],[],[],[]]}}".repeat(28_000)),
        ("many comments", "{#".repeat(500_000)),
        ("many raw blocks", format!("{{% raw %}}{}", "{% endraw ".repeat(100_000))),
        ("many variables", of(100_000, &|n| format!("{{{{x{n}}}}}"))),
        ("many assignments", of(50_000, &|n| format!("{{% set x{n} = 1 %}}"))),
        ("many arguments", format!("{{{{ dict({}) }}}}", of(50_000, &|n| format!("x{n}=1,")))),
        ("a megabyte of parameters", format!("{{% macro m({megabyte}) %}}{{% endmacro %}}")),
        ("a filter of many names", format!("{{{{ 1 | a{name} }}}}")),
        ("a test of many names", format!("{{{{ 1 is a{name} }}}}")),
        (
            "names in many macros",
            format!("{}{}{}", "{% macro m() %}".repeat(98), "{{caller}}".repeat(100_000), "{% endmacro %}".repeat(98)),
        ),
        ("many parameters", format!("{{% macro m({parameters}) %}}{{% endmacro %}}{{{{ m({arguments}) }}}}")),
    ];
    bounded(templates.into_iter().map(|(name, source)| (name.to_owned(), source)).collect());
    assert!(ChatTemplate::new(&"x".repeat((1 << 20) + 1), []).is_err());
}
