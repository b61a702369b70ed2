//! Tests the filter with real programs and real attacks.

use std::path::Path;
use std::process::{Command, Output};

use super::*;
use crate::own_process::{in_own_process, say};

#[expect(unsafe_code, reason = "an attack makes system calls that no library offers")]
#[path = "../../../tests/it/escape/syscalls.rs"]
#[allow(dead_code, reason = "the tests of whole sandboxes use more of it")]
mod attacks;

#[test]
fn every_attack_is_refused_and_every_twin_works() {
    if !in_own_process("filter::seccomp::tests::every_attack_is_refused_and_every_twin_works") {
        return;
    }
    install(&filter().unwrap()).unwrap();
    assert_eq!(attacks::attack(attacks::Numbers::All), attacks::expected(attacks::Numbers::All));
}

#[test]
fn every_call_that_is_refused_whole_is_among_the_attacks() {
    let attacked: Vec<_> = attacks::expected(attacks::Numbers::All).into_iter().map(|(name, _)| name).collect();
    // `vhangup` is not tried: hanging up the terminal cannot be made harmless.
    let missing: Vec<_> = REFUSED
        .iter()
        .flat_map(|(_, calls)| calls.iter().map(|(name, _)| name.strip_prefix("SYS_").unwrap()))
        .filter(|name| !attacked.contains(name))
        .collect();
    assert_eq!(missing, ["vhangup"]);
}

#[test]
fn without_a_filter_hardly_any_attack_is_refused_for_being_one() {
    if !in_own_process("filter::seccomp::tests::without_a_filter_hardly_any_attack_is_refused_for_being_one") {
        return;
    }
    // Without rights, the kernel itself answers `EPERM`, and the test would show nothing.
    if rustix::process::geteuid().is_root() {
        let wrong = attacks::attack(attacks::Numbers::All)
            .into_iter()
            .zip(attacks::expected(attacks::Numbers::All))
            .filter(|(found, wanted)| found != wanted);
        assert!(wrong.count() > 50);
    }
}

#[test]
fn no_call_is_in_two_lists() {
    let mut numbers: Vec<_> = ALLOWED.iter().copied().flatten().map(|(_, number)| *number).collect();
    numbers.extend(REFUSED.iter().flat_map(|(_, calls)| calls.iter().map(|(_, number)| *number)));
    numbers.extend(checked().into_iter().map(|(number, _)| number));
    let all = numbers.len();
    numbers.sort_unstable();
    numbers.dedup();
    assert_eq!(numbers.len(), all);
}

/// Returns the filter's answer, evaluated as the kernel does.
fn answer(program: &BpfProgram, architecture: u32, number: u32, arguments: [u64; 6]) -> (u32, usize) {
    let word = |offset: u32| match offset {
        0 => number,
        4 => architecture,
        offset => (arguments[(offset as usize - 16) / 8] >> (offset % 8 * 8)) as u32,
    };
    let (mut at, mut steps, mut loaded) = (0, 0, 0);
    loop {
        let sock_filter { code, jt, jf, k } = program[at].clone();
        let branch = |condition: bool| usize::from(if condition { jt } else { jf });
        (at, steps) = (at + 1, steps + 1);
        match u32::from(code) {
            0x20 => loaded = word(k),
            0x05 => at += k as usize,
            0x15 => at += branch(loaded == k),
            0x25 => at += branch(loaded > k),
            0x35 => at += branch(loaded >= k),
            0x54 => loaded &= k,
            0x06 => return (k, steps),
            code => panic!("{code:#x}"),
        }
    }
}

#[test]
fn the_program_answers_as_the_lists_say_in_few_steps() {
    let program = filter().unwrap();
    let here = ARCHITECTURE.unwrap();
    let allowed: Vec<_> = ALLOWED.iter().copied().flatten().map(|(_, number)| *number).collect();
    let refused: Vec<_> = REFUSED.iter().flat_map(|(_, calls)| calls.iter().map(|(_, number)| *number)).collect();
    let checked: Vec<_> = checked().into_iter().map(|(number, _)| number).collect();
    let mut steps_max = 0;
    for number in (0..2000).filter(|number| !checked.contains(number)) {
        let wanted = match () {
            () if allowed.contains(&number) => ALLOW,
            () if refused.contains(&number) => REFUSE,
            () => UNKNOWN,
        };
        let (found, steps) = answer(&program, here, number as u32, [0; 6]);
        assert_eq!(found, u32::from(wanted), "{number}");
        steps_max = steps_max.max(steps);
    }
    assert!(steps_max <= 14, "{steps_max}");
    assert_eq!(answer(&program, 0x4000_0003, 20, [0; 6]).0, u32::from(SeccompAction::KillProcess));
    assert_eq!(answer(&program, here, 0x4000_0000, [0; 6]).0, u32::from(UNKNOWN));
    assert_eq!(answer(&program, here, u32::MAX, [0; 6]).0, u32::from(UNKNOWN));
    assert!(program.len() < 500, "{}", program.len());
}

#[cfg(target_arch = "x86_64")]
#[test]
fn a_program_that_calls_as_another_architecture_is_killed() {
    use std::os::unix::process::ExitStatusExt;
    if !in_own_process("filter::seccomp::tests::a_program_that_calls_as_another_architecture_is_killed") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    // `int $0x80` takes i386 numbers: 20 is getpid there, and 26, which would be msync, is ptrace.
    let source = "int main(void) { int r; __asm__ volatile(\"int $0x80\" : \"=a\"(r) : \"a\"(20)); return r < 0; }";
    std::fs::write(folder.path().join("a.c"), source).unwrap();
    let compiled = Command::new("gcc").args(["a.c", "-o", "a"]).current_dir(folder.path()).status();
    if !compiled.is_ok_and(|status| status.success()) {
        return wieldy_testkit::skip("there is no C compiler for calls of another architecture");
    }
    let before = Command::new(folder.path().join("a")).status().unwrap();
    install(&filter().unwrap()).unwrap();
    let after = Command::new(folder.path().join("a")).status().unwrap();
    // A kernel without i386 kills the program without our filter.
    assert!(before.success() || before.signal().is_some(), "{before:?}");
    assert_eq!(after.signal(), Some(if before.success() { libc::SIGSYS } else { libc::SIGSEGV }));
}

/// Runs a script in a folder, and returns its output.
fn works(folder: &Path, script: &str) -> Result<String, String> {
    let Output { status, stdout, stderr } =
        // A target folder that these tests were built in is locked while another cargo builds there.
        Command::new("bash")
            .args(["-euo", "pipefail", "-c", script])
            .current_dir(folder)
            .env_remove("CARGO_TARGET_DIR")
            .output()
            .unwrap();
    let text = String::from_utf8_lossy(&[stdout, stderr].concat()).into_owned();
    if status.success() { Ok(text) } else { Err(format!("{script}\n{status}\n{text}")) }
}

const PROGRAMS: &[(&str, &str)] = &[
    ("bash", "for i in 1 2 3; do (sleep 0.01 &) ; done; wait; cat <(echo sub) | tr a-z A-Z; kill -0 $$; mkfifo pipe"),
    (
        "coreutils",
        "mkdir -p a/b; cp -a a c; mv c d; ln -s a e; stat a; df .; ls -laR; du -s .; touch f; chmod 600 f; nproc; id; date; timeout 5 true; sort -o s <(seq 1000); shuf -n 3 s; split -l 100 s; install -m 755 s t; nice true; env -i true; dd if=/dev/zero of=z bs=4k count=9; sync z; truncate -s 9 z",
    ),
    (
        "git",
        "git init -q r; cd r; echo x >x; git add .; git -c user.name=a -c user.email=b commit -qm one; git gc -q; git clone -q . ../r2; git log --stat; git status",
    ),
    (
        "python3",
        "python3 -c 'import threading,subprocess,ssl,sqlite3,multiprocessing,asyncio,socket,tempfile,mmap\nt=[threading.Thread(target=lambda:0) for _ in range(9)]\n[x.start() for x in t];[x.join() for x in t]\nassert subprocess.check_output([\"echo\",\"hi\"])==b\"hi\\n\"\nssl.create_default_context()\nwith multiprocessing.Pool(2) as p: assert p.map(abs,[-1,-2])==[1,2]\nasync def f():\n  p=await asyncio.create_subprocess_exec(\"true\"); await p.wait()\nasyncio.run(f())\ns=socket.create_server((\"127.0.0.1\",0)); c=socket.create_connection(s.getsockname())\nsocket.getaddrinfo(\"localhost\",80)\nsqlite3.connect(\"x.db\").execute(\"create table t(a)\")'",
    ),
    ("python3", "python3 -m venv --without-pip venv; ./venv/bin/python -c 'import os; os.openpty()'"),
    (
        "node",
        "node -e 'const {Worker}=require(\"worker_threads\"),cp=require(\"child_process\"),fs=require(\"fs\"),http=require(\"http\"); new Worker(\"1\",{eval:true}).on(\"exit\",()=>{ if(cp.execSync(\"echo hi\")!=\"hi\\n\") process.exit(3); fs.writeFileSync(\"f\",\"x\"); fs.watch(\".\").close(); fs.promises.readFile(\"f\").then(()=>{const s=http.createServer((q,r)=>r.end(\"ok\")).listen(0,\"127.0.0.1\",()=>http.get({port:s.address().port,host:\"127.0.0.1\"},r=>{r.resume();s.close();console.log(require(\"os\").cpus().length, r.statusCode)}))})})'",
    ),
    ("npm", "npm --version"),
    (
        "gcc",
        "printf '#include <stdio.h>\nint main(void){puts(\"hi\");}' >h.c; gcc -O2 -o h h.c; ./h; gcc -static -o hs h.c; ./hs; printf 'all: h2\nh2: h.c\n\tgcc -o h2 h.c\n' >Makefile; make -j2; ./h2; ar rc l.a h; strip h",
    ),
    (
        "g++",
        "printf '#include <thread>\n#include <iostream>\nint main(){std::thread t([]{std::cout<<1;});t.join();}' >t.cc; g++ -pthread -o t t.cc; ./t",
    ),
    (
        "rustc",
        "cargo --version; printf 'fn main(){std::thread::spawn(||println!(\"hi\")).join().unwrap()}' >m.rs; rustc -O m.rs; ./m",
    ),
    ("cargo", "cargo new --vcs none -q p; cd p; cargo build --offline; cargo test --offline -q; ./target/debug/p"),
    (
        "perl",
        "perl -MPOSIX -MSocket -MTime::HiRes=usleep -e 'fork // die; usleep 10; wait; print `echo hi`; socketpair(my $a,my $b,AF_UNIX,SOCK_STREAM,0) or die'",
    ),
    ("tar", "mkdir x; echo 1 >x/1; tar czf x.tgz x; tar cJf x.txz x; rm -r x; tar xzf x.tgz; cat x/1"),
    (
        "java",
        "printf 'public class A{public static void main(String[] a)throws Exception{Thread t=new Thread(()->System.out.println(\"hi\"));t.start();t.join();new ProcessBuilder(\"true\").start().waitFor();new java.net.ServerSocket(0).close();}}' >A.java; if command -v javac; then javac A.java; java A; else java -version; fi",
    ),
    ("sqlite3", "sqlite3 a.db 'pragma journal_mode=wal; create table t(a); insert into t values(1); select * from t'"),
    ("curl", "curl --version; curl -s file:///etc/hostname; ! curl -s --max-time 2 http://127.0.0.1:1/"),
    (
        "find",
        "mkdir -p y/z; find . -name z -exec stat {} +; grep -r hi . || true; sed -n 1p /etc/passwd; awk 'BEGIN{system(\"true\")}'; xargs -P2 -n1 echo <<<'1 2 3'",
    ),
    ("script", "script -qec 'tty; stty size' /dev/null"),
    ("ip", "ip address show"),
    ("ss", "ss -tln"),
    (
        "flock",
        "flock f true; setsid true; taskset -c 0 true; ionice true; prlimit; setarch -R true; unshare --help >/dev/null",
    ),
    ("go", "go version"),
    ("chromium", "chromium --no-sandbox --headless --dump-dom about:blank"),
];

#[test]
fn real_programs_work_under_the_filter() {
    if !in_own_process("filter::seccomp::tests::real_programs_work_under_the_filter") {
        return;
    }
    install(&filter().unwrap()).unwrap();
    let mut failed = Vec::new();
    let mut absent = Vec::new();
    for (program, script) in PROGRAMS {
        let folder = tempfile::tempdir().unwrap();
        let probe = if *program == "coreutils" { "ls" } else { program };
        if works(folder.path(), &format!("command -v {probe}")).is_err() {
            absent.push(*program);
        } else if let Err(text) = works(folder.path(), script) {
            failed.push(text);
        }
    }
    assert!(failed.is_empty(), "{}", failed.join("\n---\n"));
    say(&format!("not installed here, so not tried: {absent:?}"));
}

#[test]
fn postgresql_works_under_the_filter() {
    if !in_own_process("filter::seccomp::tests::postgresql_works_under_the_filter") {
        return;
    }
    install(&filter().unwrap()).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let script = "
        bin=$(ls -d /usr/lib/postgresql/*/bin | tail -1)
        as() { if [ $(id -u) = 0 ]; then chown nobody . && setpriv --reuid nobody --clear-groups \"$@\"; else \"$@\"; fi; }
        as $bin/initdb -D data -A trust -N
        as $bin/pg_ctl -D data -w -o \"-c listen_addresses= -k $PWD\" -l log start
        trap 'as $bin/pg_ctl -D data -m immediate stop' EXIT
        user=$(stat -c %U data)
        as $bin/psql -h $PWD -U $user -d postgres -c 'create table t(a int); insert into t select generate_series(1, 1000);' -c 'vacuum analyze t'";
    if works(folder.path(), "ls /usr/lib/postgresql/*/bin/initdb").is_err() {
        return wieldy_testkit::skip("PostgreSQL is not installed");
    }
    works(folder.path(), script).unwrap();
}

#[test]
fn the_cost_of_the_filter_is_printed() {
    if !in_own_process("filter::seccomp::tests::the_cost_of_the_filter_is_printed") {
        return;
    }
    let started = std::time::Instant::now();
    let program = filter().unwrap();
    let built = started.elapsed();
    let started = std::time::Instant::now();
    install(&program).unwrap();
    say(&format!("{} instructions, built in {built:?}, installed in {:?}", program.len(), started.elapsed()));
}
