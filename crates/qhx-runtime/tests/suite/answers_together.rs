//! Answers that are made together are those that each prompt gets alone: tokens, logits and what stages made, to the last bit.

use crate::common::{self, EOS, KINDS, device_choices, ids};
use qhx_ir::Tap;
use qhx_runtime::{
    Cancel, LoadOptions, Model, Prompt,
    verify::{Answer, Listener, Player, play_together},
};

/// Everything that is heard, in order for each prompt.
#[derive(Default, Debug, PartialEq)]
struct Heard {
    prompt: Vec<Vec<f32>>,
    steps: Vec<Vec<f32>>,
    taps: Vec<(usize, String, Vec<usize>, Vec<f32>)>,
}

impl Listener for Heard {
    fn prompt_row(&mut self, logits: &[f32]) {
        self.prompt.push(logits.to_vec());
    }

    fn step(&mut self, step: usize, logits: &[f32]) {
        assert_eq!(step, self.steps.len());
        self.steps.push(logits.to_vec());
    }

    fn tap(&mut self, first: usize, tap: Tap<'_>) {
        self.taps.push((first, tap.stage.to_owned(), tap.shape.to_vec(), tap.values.to_vec()));
    }
}

#[test]
fn each_as_if_it_were_alone() {
    for device in device_choices() {
        for kind in KINDS {
            let options = LoadOptions { sessions: 3, wanted: 4, ..common::options(device, 16, 40) };
            let model = Model::from_parts(common::parts(kind), &options).unwrap();
            // Answers of several lengths; some kinds change their constants on the way.
            let asked = [
                (Prompt::from_ids(ids(1, 7)), 3, Answer::Greedy(9)),
                (Prompt::from_ids(ids(2, 1)), 0, Answer::Until { most: 20, ends: &[EOS] }),
                (Prompt::from_ids(ids(3, 11)), 2, Answer::Given(&[4, 2, 7, 7])),
            ];
            let answer = |some: &[(Prompt, usize, Answer<'_>)]| -> Vec<(Vec<u32>, Heard)> {
                let mut sessions: Vec<_> = some.iter().map(|_| model.session().unwrap()).collect();
                let mut heard: Vec<Heard> = some.iter().map(|_| Heard::default()).collect();
                let parts = some.iter().zip(&mut sessions).zip(&mut heard);
                let mut players: Vec<_> =
                    parts.map(|(((prompt, shown, answer), session), heard)| Player::new(session, prompt, *shown, *answer, heard)).collect();
                play_together(&mut players, &Cancel::new()).unwrap();
                let answers: Vec<Vec<u32>> = players.iter().map(|player| player.ids().to_vec()).collect();
                drop(players);
                answers.into_iter().zip(heard).collect()
            };
            let together = answer(&asked);
            for (number, (some, found)) in asked.chunks(1).zip(&together).enumerate() {
                let alone = answer(some).remove(0);
                assert_eq!(found.1.prompt.len(), some[0].1, "{kind:?} on {device}: prompt {number}");
                assert_eq!(found.1.steps.len(), found.0.len(), "{kind:?} on {device}: prompt {number}");
                assert!(*found == alone, "{kind:?} on {device}: prompt {number} is answered otherwise in company");
            }
            assert_eq!((together[0].0.len(), &together[2].0[..]), (9, &[4, 2, 7, 7][..]));
        }
    }
}
