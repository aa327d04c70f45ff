/** Every string that the viewer alone says, in English and Chinese. */

export const viewStrings = {
  // The frame and the text
  loading: { en: "Asking the viewer …", zh: "正在询问查看器……" },
  factModel: {
    en: "{kind}, {parameters} parameters, {dtype} on {device}",
    zh: "{kind}，{parameters} 个参数，{device} 上的 {dtype}",
  },
  factMost: { en: "texts of up to {context} tokens", zh: "文本最多 {context} 个词元" },
  context_trained: { en: "what the model was made for", zh: "模型的设计上限" },
  context_memory: { en: "what fits into memory", zh: "内存所能容纳" },
  context_asked: { en: "as was asked", zh: "按要求设定" },
  servedBy: {
    en: "polyhead {version}, on this machine alone. The texts you type stay here.",
    zh: "polyhead {version}，只在本机运行。您输入的文本不会离开这里。",
  },
  allHeads: { en: "Every head", zh: "每一个头" },
  theText: { en: "Text", zh: "文本" },
  textSlot: { en: "Text {slot}", zh: "文本 {slot}" },
  placeholder: { en: "Type a sentence, or paste a long text", zh: "输入一句话，或粘贴一篇长文" },
  readIt: { en: "Read", zh: "读取" },
  stopReading: { en: "Stop", zh: "停止" },
  keysToRead: { en: "Ctrl+Enter reads", zh: "Ctrl+Enter 读取" },
  secondText: { en: "Compare with a second text", zh: "与第二段文本比较" },
  closeSecond: { en: "Remove text B", zh: "移除文本 B" },
  readProgress: { en: "Reading: layer {done} of {total}", zh: "读取中：第 {done} 层，共 {total} 层" },
  readStarts: { en: "Reading …", zh: "读取中……" },
  readDone: {
    en: "{tokens} tokens read in {seconds} s, {bytes} MB kept",
    zh: "{seconds} 秒读完 {tokens} 个词元，占用 {bytes} MB",
  },
  readCut: {
    en: "The text has {total} tokens; the first {read} were read.",
    zh: "文本有 {total} 个词元；只读了前 {read} 个。",
  },
  nothingRead: {
    en: "Nothing has been read yet. Type a text above and press Read; every head then shows where it looks.",
    zh: "尚未读取任何文本。请在上方输入文本并点“读取”，随后每个头都会显示它看向哪里。",
  },

  // What goes wrong
  close: { en: "Close", zh: "关闭" },
  waitingForServer: {
    en: "The server is busy. What is missing here is asked for again every second; questions that wait: {count}",
    zh: "服务器正忙。此处缺少的内容每秒会重新请求；等待中的请求：{count}",
  },
  "trouble_too-large": { en: "That is too long.", zh: "内容过长。" },
  "trouble_out-of-memory": {
    en: "The memory was not enough. A shorter text needs less.",
    zh: "内存不足。较短的文本所需更少。",
  },
  trouble_invalid: { en: "The server did not take that.", zh: "服务器未接受该请求。" },
  trouble_closing: { en: "The server is closing.", zh: "服务器正在关闭。" },
  trouble_failed: { en: "Something went wrong in the server.", zh: "服务器内部出错。" },
  offline: {
    en:
      "The viewer does not answer. What you see stays; the page goes on by itself when it answers again. If you " +
      "have started “polyhead view” anew, open the new address that it printed.",
    zh: "查看器没有应答。已显示的内容会保留；恢复应答后页面会自动继续。若已重新启动“polyhead view”，请打开它新打印的地址。",
  },

  // All heads
  encoder: { en: "Encoder", zh: "编码器" },
  decoder: { en: "Decoder", zh: "解码器" },
  crossing: { en: "Decoder to encoder", zh: "解码器到编码器" },
  gridAbout: {
    en:
      "Each square is one head: rows are the tokens that look, from the top of the text to its end, columns those " +
      "looked at; the stronger the colour, the more. Open one, or choose a word below to follow it through all heads.",
    zh: "每个方格是一个头：行是发出注视的词元，从文首到文末；列是被注视的词元；颜色越深，注视越多。可以打开一个头，或在下方选一个词，在所有头中跟踪它。",
  },
  gridLabel: {
    en: "{stack}, text {slot}. Arrow keys walk, Enter picks a head.",
    zh: "{stack}，文本 {slot}。方向键移动，Enter 选中一个头。",
  },
  gridFile: { en: "{shown} ({model}, text {slot})", zh: "{shown}（{model}，文本 {slot}）" },
  gridWeights: { en: "A cell is one weight.", zh: "每格是一个权重。" },
  gridBlocks: { en: "A cell stands for {block} × {block} tokens.", zh: "每格代表 {block} × {block} 个词元。" },
  gridEstimate: {
    en: "Estimates: of every {every} tokens the middle {rows} were looked at. Open a head for exact numbers.",
    zh: "估计值：每 {every} 个词元只看了中间 {rows} 个。打开一个头可得到精确数值。",
  },
  drawing: { en: "Drawing: layer {done} of {total}", zh: "绘制中：第 {done} 层，共 {total} 层" },
  picking: { en: "A click", zh: "点击" },
  pickOpens: { en: "opens a head", zh: "打开头" },
  pickSwitches: { en: "switches it off or on", zh: "关闭或开启头" },
  isOff: { en: "switched off", zh: "已关闭" },
  stackOf: { en: "Layers and heads", zh: "层与头" },

  // A word
  chooseWord: { en: "Words", zh: "词" },
  wordsAbout: {
    en:
      "Point at a word, or walk with the arrow keys. Shaded words are those it looks at in this head; a bar under a " +
      "word means that it looks at the chosen one. A click keeps the choice.",
    zh: "指向一个词，或用方向键移动。着色的是它在此头中看向的词；词下的横条表示该词看向所选的词。点击可固定选择。",
  },
  wordsAboutAll: {
    en: "Point at a word, or walk with the arrow keys, to see it in every head. A click keeps the choice.",
    zh: "指向一个词，或用方向键移动，即可在每个头中看到它。点击可固定选择。",
  },
  wordInHeads: { en: "“{word}” in every head", zh: "“{word}”在每个头中" },
  wordInHeadsAbout: {
    en: "Each square names the token with the largest weight; the strip shows all of them along the text.",
    zh: "每个方格写出权重最大的词元；色条显示全文各处的权重。",
  },
  whichWay: { en: "Direction", zh: "方向" },
  looksAt: { en: "it looks at", zh: "它看向" },
  isSeenBy: { en: "it is looked at by", zh: "看向它的" },
  wordCell: { en: "{head}: {token} {share}", zh: "{head}：{token} {share}" },
  notHere: { en: "{head}: has no part in it", zh: "{head}：与之无关" },
  pagesOfText: { en: "Part of the text", zh: "文本的部分" },
  tokensFromTo: { en: "Tokens {first} to {last} of {total}", zh: "第 {first} 到 {last} 个词元，共 {total} 个" },
  earlier: { en: "Earlier", zh: "向前" },
  later: { en: "Later", zh: "向后" },
  textLine: { en: "Words of the text", zh: "文本的词" },
  targetLine: { en: "Words that were written", zh: "写出的词" },
  tokenNumber: { en: "token {number}", zh: "第 {number} 个词元" },

  // One head
  noSuchHead: { en: "There is no such head.", zh: "没有这样的头。" },
  noSuchText: { en: "Text {slot} has not been read.", zh: "文本 {slot} 尚未读取。" },
  previousHead: { en: "Previous head", zh: "上一个头" },
  nextHead: { en: "Next head", zh: "下一个头" },
  switchOff: { en: "Switch this head off", zh: "关闭此头" },
  switchOn: { en: "Switch this head on", zh: "开启此头" },
  compareWith: { en: "Compare with", zh: "与之比较" },
  nothing: { en: "nothing", zh: "无" },
  whichText: { en: "Text", zh: "文本" },
  whichLayer: { en: "Layer", zh: "层" },
  whichHead: { en: "Head", zh: "头" },
  distanceIs: {
    en:
      "On average the rows of the two differ by {distance} (Jensen-Shannon distance; 0 the same, {most} nothing " +
      "in common).",
    zh: "两者各行平均相差 {distance}（Jensen-Shannon 距离；0 为相同，{most} 为毫无共同）。",
  },
  distanceUnlike: {
    en: "How far the two are apart is not told: they look at different numbers of tokens.",
    zh: "无法比较两者的距离：它们的词元数不同。",
  },
  distanceNone: { en: "No distance: {reason}", zh: "无距离：{reason}" },
  distanceComputing: { en: "Computing how far apart they are …", zh: "正在计算两者的距离……" },

  // The output
  output: { en: "What the model says", zh: "模型的输出" },
  nextToken: { en: "Next token", zh: "下一个词元" },
  maskedToken: { en: "Token at place {position}", zh: "第 {position} 位的词元" },
  vectorOutput: {
    en: "An encoder says a vector of {size} numbers; switch heads off, or read a second text, to see how it turns.",
    zh: "编码器输出 {size} 维向量；关闭某些头或读取第二段文本，可看到它如何变化。",
  },
  entropyIs: { en: "Entropy {nats}", zh: "熵 {nats}" },
  candidate: { en: "Write “{token}”, probability {share}", zh: "写入“{token}”，概率 {share}" },
  writeNext: { en: "Write the likeliest token", zh: "写入最可能的词元" },
  takeBack: { en: "Take back", zh: "撤回" },
  chooseCandidate: { en: "Write one of these:", zh: "写入其中之一：" },
  writtenAbout: { en: "Whom the newest token, “{token}”, looks at", zh: "最新的词元“{token}”看向谁" },
  writtenCount: { en: "Tokens written: {count}", zh: "已写出词元：{count}" },
  offHeads: { en: "Heads that are off", zh: "已关闭的头" },
  offNone: {
    en: "None. Switch one off in its panel, or in the grid, to see what changes.",
    zh: "无。可在头的面板或网格中关闭一个头，看有何变化。",
  },
  switchBack: { en: "Switch {head} on again", zh: "重新开启{head}" },
  allOn: { en: "All on again", zh: "全部开启" },
  readWithout: { en: "Read again without them", zh: "不用它们重新读取" },
  readWithoutAbout: {
    en: "The pictures are of the whole model; read again to see later layers without these heads.",
    zh: "图中是完整的模型；重新读取可看到没有这些头时后面各层的情形。",
  },
  wereOff: { en: "Text {slot} was read without {heads}.", zh: "文本 {slot} 读取时未使用{heads}。" },
  effectOf: { en: "What changes in text {slot}", zh: "文本 {slot} 的变化" },
  effectComputing: { en: "Computing what changes …", zh: "正在计算变化……" },
  divergenceIs: { en: "Kullback-Leibler divergence: {nats}", zh: "KL 散度：{nats}" },
  cosineIs: { en: "Cosine of the two vectors: {cosine}", zh: "两个向量的余弦：{cosine}" },
  endless: { en: "not finite", zh: "非有限值" },
  token: { en: "Token", zh: "词元" },
  before: { en: "Before", zh: "之前" },
  after: { en: "After", zh: "之后" },
  betweenTexts: { en: "Text A and text B", zh: "文本 A 与文本 B" },

  // The map
  map: { en: "The attention matrix", zh: "注意力矩阵" },
  mapOf: { en: "{head}, text {slot}", zh: "{head}，文本 {slot}" },
  mapHelp: {
    en:
      "Wheel or pinch zooms, drag moves, a click chooses the word that looks. Keys: + and − zoom, arrows move, " +
      "Enter chooses, 0 shows the whole.",
    zh: "滚轮或双指缩放，拖动平移，点击选中发出注视的词。按键：+ 和 − 缩放，方向键移动，Enter 选中，0 显示全部。",
  },
  mapLabel: {
    en:
      "Map of the attention of {head}. Plus and minus zoom, arrow keys move, 0 shows the whole; the weight at " +
      "the cross is told below.",
    zh: "{head}的注意力地图。加减号缩放，方向键移动，0 显示全部；十字处的权重见下方。",
  },
  zoomIn: { en: "Zoom in", zh: "放大" },
  zoomOut: { en: "Zoom out", zh: "缩小" },
  zoomWhole: { en: "Whole", zh: "全部" },
  zoomTokens: { en: "Tokens", zh: "词元" },
  pool: { en: "Cells of several tokens show", zh: "多词元的格显示" },
  pool_sum: { en: "their share", zh: "其份额" },
  pool_max: { en: "their largest weight", zh: "其最大权重" },
  mapEstimate: { en: "Estimate. Exact: {done} of {total}", zh: "估计值。精确计算：{done}/{total}" },
  mapComputing: { en: "Exact numbers arrive: {done} of {total}", zh: "精确数值：{done}/{total}" },
  mapExact: { en: "Exact", zh: "精确" },
  mapWaiting: { en: "Computing …", zh: "计算中……" },
  mapTiles: { en: "Exact; {count} finer tiles on their way", zh: "精确；{count} 个更细的图块即将到达" },
  cellOne: { en: "{query} ({i}) looks at {key} ({j}): {weight}", zh: "{query}（{i}）看向 {key}（{j}）：{weight}" },
  cellSum: {
    en: "Tokens {rows} look at tokens {columns}: {share} of their attention",
    zh: "词元 {rows} 看向词元 {columns}：占其注意力的 {share}",
  },
  cellMax: {
    en: "Tokens {rows} look at tokens {columns}: at most {share}",
    zh: "词元 {rows} 看向词元 {columns}：最多 {share}",
  },
  stripOfHeads: { en: "All heads", zh: "所有的头" },
} as const;
