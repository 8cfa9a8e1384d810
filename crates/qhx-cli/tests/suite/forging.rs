//! Forging that is stopped half-way, by a full disk or by a person, leaves nothing behind; many processes that need one bundle make it once.
#![cfg(unix)]

use crate::common::{DEVICE, failed, fixture, listing, qhx, ran, scratch, wait_for_line, wait_until};
use serde_json::json;
use std::{
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

/// A configuration of about half a billion parameters: seconds of work, of which the tests wait for the first moments.
fn large_config(folder: &Path) -> PathBuf {
    let file = folder.join("config.json");
    let config = json!({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 8192,
        "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 16, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": false
    });
    fs::write(&file, config.to_string()).unwrap();
    file
}

#[test]
fn a_full_disk() {
    let folder = scratch();
    let out = folder.path().join("place").join("bundle");
    let config = large_config(folder.path());
    // A limit on file sizes stands for a full disk: both are write errors half-way. The program itself ignores the signal.
    let script = "ulimit -f 2000; exec \"$@\"";
    let command = qhx(["synth", config.to_str().unwrap(), "--out", out.to_str().unwrap(), "--precision", "f32"]);
    let mut limited = Command::new("sh");
    limited.args(["-c", script, "sh"]).arg(command.get_program()).args(command.get_args()).stdin(Stdio::null());
    limited.env("QHX_CACHE_DIR", folder.path().join("cache"));
    failed(ran(limited.output().unwrap()), 1, &["File too large", "hint: nothing was left behind"]);
    assert_eq!(listing(folder.path()), ["config.json"]);
}

#[test]
fn ctrl_c() {
    for signal in ["INT", "TERM"] {
        let folder = scratch();
        let place = folder.path().join("place");
        fs::create_dir(&place).unwrap();
        let config = large_config(folder.path());
        let out = place.join("bundle");
        let arguments = ["synth", config.to_str().unwrap(), "--out", out.to_str().unwrap(), "--precision", "w4"];
        let child = qhx(arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        wait_until("forging has begun", || listing(&place).iter().any(|name| name.contains("tmp")));
        let sent = Command::new("kill").args([&format!("-{signal}"), &child.id().to_string()]).status().unwrap();
        assert!(sent.success());
        let asked = Instant::now();
        failed(ran(child.wait_with_output().unwrap()), 1, &["cancelled: nothing was written"]);
        assert!(asked.elapsed() < Duration::from_secs(10), "it took {:?} to stop", asked.elapsed());
        assert_eq!(listing(&place), [""; 0], "after {signal}");
    }
}

/// `qhx run` of a checkpoint, on its way.
fn answering(model: &Path, cache: &Path) -> Child {
    let mut command = qhx([Path::new("run"), model, Path::new("hello")]);
    command.args(["--max-new", "3", "--ignore-eos", "--device", DEVICE]).env("QHX_CACHE_DIR", cache);
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

#[test]
fn many_processes_forge_a_checkpoint_once() {
    let folder = scratch();
    let model = folder.path().join("tiny.gguf");
    fs::copy(fixture("llama-gguf").join("model.gguf"), &model).unwrap();
    let cache = folder.path().join("cache");
    let started: Vec<_> = (0..8).map(|_| answering(&model, &cache)).collect();
    let all: Vec<_> = started.into_iter().map(|child| ran(child.wait_with_output().unwrap())).collect();
    for found in &all {
        assert!(found.code == Some(0) && found.stdout == all[0].stdout && !found.stdout.is_empty(), "{found:?}");
    }
    let forged = all.iter().filter(|found| found.stderr.contains("(once)")).count();
    let waited = all.iter().filter(|found| found.stderr.contains("another qhx process is forging tiny: waiting for it")).count();
    assert!(forged == 1 && (1..8).contains(&waited), "{all:?}");
}

#[test]
fn who_waits_goes_on_when_the_holder_is_gone_and_can_be_stopped() {
    let folder = scratch();
    let (model, cache) = (fixture("llama-gguf").join("model.gguf"), folder.path().join("cache"));
    let first = ran(answering(&model, &cache).wait_with_output().unwrap());
    let lock = fs::File::open(cache.join("locks").join(&listing(&cache.join("locks"))[0])).unwrap();
    // A process that has just begun to forge.
    fs::remove_dir_all(cache.join("models")).unwrap();
    lock.lock().unwrap();
    let [stopped, patient] = [(); 2].map(|()| {
        let mut child = answering(&model, &cache);
        wait_for_line(&mut child, "another qhx process is forging model: waiting for it");
        child
    });
    assert!(Command::new("kill").args(["-TERM", &stopped.id().to_string()]).status().unwrap().success());
    failed(ran(stopped.wait_with_output().unwrap()), 1, &["cancelled"]);
    // It ends without having made anything: the system takes its lock back.
    drop(lock);
    let found = ran(patient.wait_with_output().unwrap());
    assert!(found.code == Some(0) && found.stdout == first.stdout && found.stderr.contains("(once)"), "{found:?}");
}
